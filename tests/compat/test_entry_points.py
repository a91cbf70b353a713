"""``run.main(args)`` and ``launch.main(args)``, called from a program, raise what torch's functions raise."""

import ast
import subprocess
import sys

import pytest
from helpers.launcher import clean_environment

PROGRAM = """
import importlib, sys

package, name, *args = sys.argv[1:]
try:
    importlib.import_module(f"{package}.{name}").main(args)
except BaseException as error:
    ancestors = [each.__name__ for each in type(error).__mro__]
    print((ancestors, getattr(error, "code", None)))
else:
    print(([], None))
"""

OUTCOMES = [
    (["no-such-file.py"], "ChildFailedError"),
    (["fails.py"], "ChildFailedError"),
    (["--no-python", "false"], "ChildFailedError"),
    (["--nproc-per-node=unknown", "fails.py"], "ValueError"),
    (["--module", "--no-python", "fails"], "ValueError"),
    (["--nnodes=1:2:3", "fails.py"], "RuntimeError"),
    (["--nnodes=x", "fails.py"], "ValueError"),
    (["--tee=9x", "fails.py"], "ValueError"),
    (["--rdzv-conf=a", "fails.py"], "ValueError"),
    (["--rdzv-backend=unknown", "fails.py"], "ValueError"),
    (["--max-restarts=x", "fails.py"], "SystemExit"),
    (["--no-such-option", "fails.py"], "SystemExit"),
    ([], "SystemExit"),
    (["--no-python", "true"], None),
]


@pytest.fixture
def outcome(tmp_path):
    """Call ``main`` in a new interpreter; return the names of its exception's classes and the exit code."""
    (tmp_path / "fails.py").write_text("raise SystemExit(3)\n", encoding="utf-8")

    def outcome(package, name, args):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, package, name, *args],
            cwd=tmp_path,
            env=clean_environment({"PYTHONPATH": ":".join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}),
            capture_output=True,
            text=True,
            timeout=55,
            check=True,
        )
        return ast.literal_eval(done.stdout.splitlines()[-1])

    return outcome


@pytest.mark.parametrize("name", ["run", "launch"])
@pytest.mark.parametrize(("args", "expected"), OUTCOMES)
@pytest.mark.parametrize("package", [pytest.param("torch.distributed", marks=pytest.mark.torch), "elasticrs"])
def test_main_raises_every_failure_to_the_program_that_calls_it(outcome, package, name, args, expected):
    if name == "launch" and "--no-python" in args:
        args = ["--use-env", *args]
    ancestors, code = outcome(package, name, args)
    assert expected in ancestors if expected else not ancestors
    assert code == (2 if expected == "SystemExit" else None)


@pytest.mark.parametrize("package", [pytest.param("torch.distributed", marks=pytest.mark.torch), "elasticrs"])
def test_the_old_launcher_refuses_a_program_without_use_env(outcome, package):
    ancestors, _ = outcome(package, "launch", ["--no-python", "true"])
    assert "ValueError" in ancestors
