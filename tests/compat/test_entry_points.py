"""``run.main(args)`` and ``launch.main(args)``, called from a program, raise what torch's functions raise."""

import json

import pytest

pytestmark = pytest.mark.torch

PROGRAM = """
import importlib, json, os, sys

package, name, *cases = json.loads(sys.argv[1])
os.chdir(sys.argv[2])
os.environ["TMPDIR"] = sys.argv[2]
main = importlib.import_module(f"{package}.{name}").main
for args in cases:
    # Each call gets a process of its own.
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            main(args)
        except BaseException as error:
            told = [[each.__name__ for each in type(error).__mro__], getattr(error, "code", None)]
        else:
            told = [[], None]
        os.write(writer, json.dumps(told).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as answer:
        print(answer.read(), flush=True)
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
def outcomes(tmp_path, torch_programs):
    """Return a function that calls ``main`` with each list of arguments, and returns the exceptions' class
    names and exit codes.
    """
    (tmp_path / "fails.py").write_text("raise SystemExit(3)\n", encoding="utf-8")

    def outcomes(package, name, cases):
        arguments = (json.dumps([package, name, *cases]), str(tmp_path))
        output = torch_programs.checked(PROGRAM, *arguments, timeout=170)
        return [json.loads(line) for line in output.splitlines() if line.startswith("[[")]

    return outcomes


each_package = pytest.mark.parametrize("package", ["torch.distributed", "elasticrs"])


@pytest.mark.parametrize("name", ["run", "launch"])
@each_package
def test_main_raises_every_failure_to_its_caller(outcomes, package, name):
    flag = ["--use-env"] if name == "launch" else []
    cases = [[*(flag if "--no-python" in args else []), *args] for args, _ in OUTCOMES]
    found = outcomes(package, name, cases)
    assert len(found) == len(cases)
    for args, (_, expected), (ancestors, code) in zip(cases, OUTCOMES, found, strict=True):
        assert expected in ancestors if expected else not ancestors, args
        assert code == (2 if expected == "SystemExit" else None), args


@each_package
def test_distributed_launch_refuses_no_python_without_use_env(outcomes, package):
    ((ancestors, _),) = outcomes(package, "launch", [["--no-python", "true"]])
    assert "ValueError" in ancestors
