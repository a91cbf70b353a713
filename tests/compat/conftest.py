"""Both launchers, each in a folder of its own, with what the reference leaves behind; the import switch."""

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
from helpers import procs
from helpers.launcher import LAUNCHERS

TREE = Path(__file__).resolve().parent.parent.parent / "python"


@pytest.fixture
def start(launch, tmp_path):
    """Starts ``"torchrun"`` or ``"elasticrs"``; see :class:`helpers.launcher.Launched`."""
    started, told = [], []

    def start(launcher, *args, env=None):
        home = tmp_path / launcher
        home.mkdir(exist_ok=True)
        told.append(launcher)
        started.append(
            launch(*args, argv=LAUNCHERS[launcher], env={"TMPDIR": str(home), **(env or {})}, cwd=home)
        )
        return started[-1]

    yield start
    if "torchrun" in told:
        procs.kill_adopted(keep=[each.pid for each in started])


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The interpreter of an environment that sees this tree and the packages of the tests."""
    folder = tmp_path_factory.mktemp("alias") / "venv"
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Not by PYTHONPATH: what an environment has, each of its interpreters has. The name is the one of an
    # editable installation.
    (packages / "elasticrs.pth").write_text(f"{TREE}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return folder / "bin" / "python"


@pytest.fixture
def run(environment, tmp_path):
    def run(*args, on=True, check=True, cwd=tmp_path, **variables):
        kept = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
        switch = {"ELASTICRS_ALIAS": "1"} if on else {}
        return subprocess.run(
            [environment, *args],
            env={**kept, **switch, **variables},
            capture_output=True,
            text=True,
            timeout=150,
            check=check,
            cwd=cwd,
        )

    return run


@pytest.fixture
def installed(run):
    run("-m", "elasticrs.alias", "install")
    yield run
    run("-m", "elasticrs.alias", "uninstall")
