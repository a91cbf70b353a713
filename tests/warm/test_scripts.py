"""Scripts run the same warm as cold, whatever their type, name, text, directory and command line."""

import ast
import os
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.fidelity import Job
from helpers.said import has, line_with

from elasticrs._engine import inside

pytestmark = pytest.mark.beyond_torchrun

SHOW = """
import sys
IS_WARM = "colorsys" in sys.modules
import colorsys, inspect, json, os
main = sys.modules["__main__"]
names = ("__name__", "__file__", "__package__", "__doc__", "__cached__")
seen = {name: repr(vars(main).get(name)) for name in names}
seen["spec"] = main.__spec__ and [main.__spec__.name, main.__spec__.origin, main.__spec__.parent]
seen["loader"] = type(main.__loader__).__name__
seen["sys"] = [sys.argv, sys.path, sys.orig_argv]
seen["sys"] += [sys.argv[0] in [os.path.abspath(each) for each in sys.path_importer_cache]]
seen["others"] = [colorsys.__file__, json.__file__, getattr(colorsys, "mine", None), __name__]
seen["stack"] = [[each.filename, each.function, each.lineno] for each in inspect.stack()]
seen["cmdline"] = open("/proc/self/cmdline").read().split("\\0")
seen["builtins"] = [name for name in dir(__builtins__) if name.startswith("mine")]
for name, value in seen.items():
    print(name, value)
with open(f"facts/0.{os.environ['RANK']}.json", "w") as file:
    file.write("true" if IS_WARM else "false")
"""
ARGUED = {r"[\d.]+/facts": "tells them apart"}


@pytest.fixture
def job(launch, tmp_path):
    return Job(launch, tmp_path, "json,colorsys")


@pytest.fixture
def same(job):
    """Return a function that compares a cold and a warm run, and checks that all workers of the second run
    started warm.
    """

    def compare(*command, is_warm=True, **how):
        outcome = job.compare(*command, argued=ARGUED, **how)
        found = {worker.facts for worker in outcome.workers.values()}
        assert found <= {is_warm}, outcome.stderr
        return outcome

    return compare


def write(folder, name, text, encoding="utf-8"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain.py", SHOW),
        ("a name, with spaces\n.txt", "#!/usr/bin/env python\n" + SHOW),
        ("cookie.py", "# -*- coding: latin-1 -*-\n'''Text: \u00e4'''\nprint(ascii(__doc__))\n" + SHOW),
        (
            "bom.py",
            "\ufeff'''Text: \u00e4'''\nfrom __future__ import annotations\nclass A:\n x: no_such\n" + SHOW,
        ),
        ("ends_in_the_middle.py", SHOW + "if True:\n    print('a')\n# no line feed"),
    ],
    ids=["plain", "shebang", "cookie", "bom", "no line feed"],
)
def test_script_files_run_the_same_warm_and_cold(same, tmp_path, name, text):
    encoding = "latin-1" if "cookie" in name else "utf-8"
    same("--", write(tmp_path, name, text, encoding), "a", "--b", "", "ü")


PROGRAMS = {
    "folder/real.py": SHOW,
    "program/__main__.py": SHOW,
    "package/__main__.py": SHOW,
    "package/__init__.py": "print('the package', __name__)\n",
    "package/part.py": "from . import other\n" + SHOW,
    "package/other.py": "print('other', __name__)\n",
    "single.py": SHOW,
}


@pytest.mark.parametrize(
    "command",
    [
        ("./link.py",),
        ("folder/../folder/real.py",),
        ("program", "a"),
        ("program.zip", "a"),
        ("--nproc-per-node=2", "-m", "package", "a"),
        ("-m", "package.part", "--b"),
        ("-m", "single"),
    ],
    ids=" ".join,
)
def test_links_folders_archives_and_modules_run_the_same_warm_and_cold(same, tmp_path, command):
    for name, text in PROGRAMS.items():
        write(tmp_path, name, text)
    (tmp_path / "link.py").symlink_to("folder/real.py")
    with zipfile.ZipFile(tmp_path / "program.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    same(*command)


@pytest.mark.parametrize(
    "command",
    [
        ("missing.py",),
        ("-m", "missing"),
        ("-m", "json"),
        ("-m", "json.missing"),
        ("broken.py",),
        ("nul.py",),
        ("empty",),
    ],
    ids=" ".join,
)
def test_a_script_that_cannot_run_fails_the_same_warm_and_cold(same, tmp_path, command):
    write(tmp_path, "broken.py", "x = 1\ndef broken(:\n")
    write(tmp_path, "nul.py", "x = '\0'\n")
    (tmp_path / "empty").mkdir()
    same(*command, is_warm=None)


def test_a_module_beside_the_script_takes_precedence(same, tmp_path):
    write(tmp_path, "colorsys.py", "mine = 'of the user'\n")
    outcome = same(write(tmp_path, "plain.py", SHOW.replace('"colorsys"', '"json"')))
    assert "of the user" in outcome.workers["0.0"].stdout


WITH_LIBRARY = """
import os
import a_library, colorsys
os.write(1, f"{colorsys.__doc__} {a_library.colorsys.__doc__}\\n".encode())
"""


@pytest.mark.parametrize("is_beside", [True, False])
def test_a_module_beside_the_script_wins_in_preloaded_modules_too(launch, worker_script, is_beside, library):
    env = library(a_library="import json, colorsys")
    script = worker_script(WITH_LIBRARY)
    (script.parent / ("colorsys.py" if is_beside else "another.py")).write_text("'''mine'''")
    started = launch("--warm=auto", script, env=env)
    assert started.wait() == 0, started.stderr
    left_out = has(started.stderr, "warm: a_library ", " colorsys")
    assert left_out is (started.stdout == "mine mine\n") is is_beside


ELASTICRUN = [os.path.join(os.path.dirname(sys.executable), "elasticrun")]
MODULE = [sys.executable, "-m", "elasticrs.launch"]
"""Started in the folder of the script, where ``python -m`` looks first for modules."""


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("json", ELASTICRUN),
        ("contextlib", ELASTICRUN),
        ("sysconfig", ELASTICRUN),
        ("json", MODULE),
        ("sysconfig", MODULE),
    ],
)
def test_modules_loaded_by_the_nursery_do_not_hide_user_modules(launch, tmp_path, name, launcher):
    write(tmp_path, f"{name}.py", "mine = 'of the user'\n")
    script = write(tmp_path, "plain.py", f"import {name}, os\nos.write(1, {name}.mine.encode())\n")
    launched = launch("--warm", "colorsys", script, argv=launcher).exits(0)
    assert launched.stdout == "of the user"
    line_with(launched.stderr, "warm: ", "cold", f": {name} ")


def test_a_script_may_be_named_like_a_preloaded_module(same, tmp_path):
    same(write(tmp_path, "folder/colorsys.py", SHOW.replace('"colorsys"', '"json"')))


def test_a_module_in_pythonpath_takes_precedence(same, tmp_path):
    write(tmp_path, "mine/colorsys.py", "mine = 'of the user'\n")
    outcome = same(write(tmp_path, "plain.py", SHOW), env={"PYTHONPATH": "mine"})
    assert "of the user" in outcome.workers["0.0"].stdout


CUSTOM = """
import builtins, os, sys
setattr(builtins, "mine_" + os.environ["RANK"], 1)
sys.path.append("/added/by/the/user")
sys.stderr.write("customized %s %s\\n" % (os.getpid() == os.getsid(0), sys.argv))
"""


@pytest.mark.parametrize(
    "end", ["", "1 / 0\n", "import missing_module\n"], ids=["whole", "raises", "lacks a module"]
)
def test_the_users_sitecustomize_runs_the_same_warm_and_cold(same, tmp_path, end):
    write(tmp_path, "custom/sitecustomize.py", CUSTOM + end)
    outcome = same("--nproc-per-node=2", write(tmp_path, "plain.py", SHOW), env={"PYTHONPATH": "custom"})
    assert "customized True" in outcome.workers["0.1"].stderr


def test_standard_input_is_the_same_warm_and_cold(job, tmp_path):
    script = write(tmp_path, "plain.py", SHOW + "print(input(), repr(sys.stdin.read()))\n")
    outcomes = []
    for is_warm in (False, True):
        with open(write(tmp_path, "input", "first\nsecond\nthird\n")) as file:
            outcomes.append(job.run(script, warm=is_warm, stdin=file.fileno()))
    assert outcomes[0].workers["0.0"].stdout == outcomes[1].workers["0.0"].stdout
    assert outcomes[1].workers["0.0"].stdout.endswith("first 'second\\nthird\\n'\n")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_run_path_scripts_run_the_same_warm_and_cold(job, tmp_path, method):
    script = write(tmp_path, "plain.py", SHOW)
    command = ("--nproc-per-node=2", "--run-path", "--start-method", method, script, "a")
    outcome = job.compare(*command, argued=ARGUED)
    assert {worker.facts for worker in outcome.workers.values()} == {method == "spawn"}


def test_another_interpreter_runs_scripts_the_same_warm_and_cold(same, tmp_path):
    same(write(tmp_path, "plain.py", SHOW), env={"PYTHON_EXEC": os.path.realpath(sys.executable)})


DRAWS = """
import sys
IS_WARM = "random" in sys.modules
import json, multiprocessing, os, random, secrets, tempfile, uuid
import numpy
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
drawn = {
    "random": random.random(),
    "generator": random.Random().random(),
    "secrets": secrets.token_hex(),
    "uuid": [str(uuid.uuid4()), str(uuid.uuid1())[:8]],
    "name": os.path.basename(tempfile.mktemp()),
    "key": multiprocessing.current_process().authkey.hex(),
    "numpy": float(numpy.random.rand()),
    "numpy's generator": float(numpy.random.default_rng().random()),
    "hash": hash("text"),
    "hash of bytes": hash(b"bytes"),
}
random.seed(3)
drawn["seeded"] = random.random()
numpy.random.seed(3)
drawn["numpy seeded"] = float(numpy.random.rand())
if "torch" in sys.argv:
    import torch
    drawn["torch"] = torch.rand(1).item()
    drawn["torch's seed"] = torch.initial_seed()
    torch.manual_seed(3)
    drawn["torch seeded"] = torch.rand(1).item()
with open(f"facts/{attempt}.{rank}.part", "w") as file:
    json.dump({"warm": IS_WARM, "drawn": drawn}, file)
os.rename(f"facts/{attempt}.{rank}.part", f"facts/{attempt}.{rank}.json")
while attempt == 0 and not os.path.exists(f"facts/0.{1 - rank}.json"):
    pass
sys.exit(1 if attempt == 0 else 0)
"""

HASHES = {"hash", "hash of bytes"}
"""One seed for all that come from one process: strings have kept their hashes."""


def pattern(outcome, name):
    """Return which ranks and attempts drew equal values: equal numbers in the list stand for equal values."""
    values = [str(outcome.workers[each].facts["drawn"][name]) for each in ("0.0", "0.1", "1.0", "1.1")]
    return [values.index(value) for value in values]


@pytest.mark.parametrize(
    "modules", ["random,numpy", pytest.param("random,torch", marks=[pytest.mark.torch, pytest.mark.slow])]
)
def test_random_numbers_differ_between_warm_workers_as_between_cold_workers(launch, tmp_path, modules):
    job = Job(launch, tmp_path, modules, timeout=150)
    command = (
        "--nproc-per-node=2",
        "--max-restarts=1",
        write(tmp_path, "draws.py", DRAWS),
        modules.split(",")[1],
    )
    cold, warm = (job.run(*command, warm=is_warm) for is_warm in (False, True))
    assert cold.code == warm.code == 0, warm.stderr
    for name in cold.workers["0.0"].facts["drawn"]:
        assert name in HASHES or pattern(cold, name) == pattern(warm, name), name
        assert pattern(cold, name) == [0, 0, 0, 0] if "seeded" in name else [0, 1, 2, 3], name
    assert all(worker.facts["warm"] for worker in warm.workers.values()), warm.stderr


def test_a_given_hash_seed_is_kept(job, tmp_path):
    script = write(tmp_path, "hash.py", SHOW + "print({'a', 'b', 'c', 'd', 'e'}, hash('text'))")
    job.compare("--nproc-per-node=2", script, env={"PYTHONHASHSEED": "5"}, argued=ARGUED)


def test_sitecustomize_of_the_nursery_parses_with_old_pythons():
    """With a syntax error there, Python would go on to the user's script."""
    source = Path(inside.__file__).parent / "nursery/sitecustomize.py"
    assert ast.parse(source.read_text(), feature_version=(3, 4))


def test_an_empty_pythonpath_is_ignored(launch, worker_script):
    script = worker_script("import os, sys\nos.write(1, f'{sys.path[1:]}\\n'.encode())")
    env = {"PYTHONPATH": "", "ELASTICRS_TRACEBACKS": "0"}
    cold, warm = (launch("--standalone", f"--warm={it}", script, env=env).exits(0) for it in ("off", "json"))
    assert warm.stdout == cold.stdout
