"""Fixtures that start both launchers in separate folders, clean up after torchrun, and switch the import
alias on.
"""

import os
import sysconfig
import venv
from pathlib import Path

import pytest
from helpers import procs
from helpers.launcher import LAUNCHERS
from helpers.procs import run_program

TREE = Path(__file__).resolve().parent.parent.parent / "python"


@pytest.fixture
def start(launch, tmp_path):
    """Return a function that starts ``"torchrun"`` or ``"elasticrs"`` as a
    :class:`helpers.launcher.Launched`.
    """
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
    """Return the interpreter of a virtual environment that contains this source tree and the packages of the
    tests.
    """
    folder = tmp_path_factory.mktemp("alias") / "venv"
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Use a `.pth` file instead of PYTHONPATH, because every interpreter of the environment then finds the
    # packages. The file has the name that an editable installation would use.
    (packages / "elasticrs.pth").write_text(f"{TREE}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return folder / "bin" / "python"


@pytest.fixture
def run(environment, tmp_path):
    def run(*args, on=True, check=True, cwd=tmp_path, **variables):
        kept = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
        switch = {"ELASTICRS_ALIAS": "1"} if on else {}
        return run_program(
            [environment, *args], env={**kept, **switch, **variables}, timeout=150, check=check, cwd=cwd
        )

    return run


@pytest.fixture
def installed(run):
    run("-m", "elasticrs.alias", "install")
    yield run
    run("-m", "elasticrs.alias", "uninstall")
