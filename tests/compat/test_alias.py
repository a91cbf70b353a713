"""With ``ELASTICRS_ALIAS=1``, importing torch's elastic modules loads ours. The tests use separate
environments.
"""

import os
import venv

import pytest
from helpers import procs
from helpers.procs import run_program

from elasticrs.alias import our_name
from elasticrs.alias.launch import with_local_rank

from .conftest import TREE


def test_the_alias_hook_can_be_installed_and_uninstalled(run, environment):
    status = ("-m", "elasticrs.alias", "status")
    assert run(*status, check=False).returncode == 1
    told = run("-m", "elasticrs.alias", "install").stdout
    path = environment.parent.parent / next(iter(environment.parent.parent.glob("lib/*/*/*alias.pth")))
    assert str(path) in told
    assert run(*status).stdout.endswith("on\n")
    assert "off" in run(*status, on=False).stdout
    run("-m", "elasticrs.alias", "uninstall")
    assert not path.exists()
    assert "not installed" in run("-m", "elasticrs.alias", "uninstall").stdout


@pytest.fixture
def late_environment(tmp_path):
    """Return the interpreter and packages folder of an environment where the hook runs before elasticrs is
    importable.
    """
    folder = tmp_path / "venv"
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # The interpreter of a virtual environment runs its `.pth` files twice. Add the folder of elasticrs in the
    # second run only, because --system-site-packages adds the folders of the base installation at that time.
    count = "vars(sys).setdefault('times', []).append(1)"
    line = f"import sys; {count}; sys.times[1:] and sys.path.append({str(TREE)!r})"
    (packages / "later.pth").write_text(line, encoding="utf-8")
    return folder / "bin" / "python", packages


def run_late(python, *args, **variables):
    variables["PATH"] = os.environ["PATH"]
    return run_program([python, *args], env=variables)


def test_install_refuses_an_environment_where_the_hook_cannot_work(late_environment):
    python, packages = late_environment
    done = run_late(python, "-m", "elasticrs.alias", "install")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "environment" in done.stderr
    assert not list(packages.glob("elasticrs_alias.pth"))


def test_a_broken_alias_hook_prints_one_line_at_each_python_start(late_environment):
    python, packages = late_environment
    (packages / "elasticrs.pth").write_text(str(TREE), encoding="utf-8")
    assert run_late(python, "-m", "elasticrs.alias", "install").returncode == 0
    for path in ("elasticrs.pth", "later.pth"):
        (packages / path).unlink()
    done = run_late(python, "-c", "", ELASTICRS_ALIAS="1")
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert "ELASTICRS_ALIAS=1" in done.stderr
    assert run_late(python, "-c", "").stderr == ""


@pytest.mark.parametrize("args", [[], ["instal"], ["install", "now"]])
def test_an_invalid_alias_command_prints_one_line(run, args):
    done = run("-m", "elasticrs.alias", *args, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "status" in done.stderr


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_the_help_of_the_alias_command_lists_its_actions(run, word):
    assert "install|uninstall|status" in run("-m", "elasticrs.alias", word).stdout


def test_an_inactive_alias_loads_no_modules(installed):
    shown = "import sys; print(*sorted(sys.modules))"
    off = installed("-c", shown, on=False).stdout.split()
    assert not [name for name in off if name.startswith("elasticrs")]
    installed("-m", "elasticrs.alias", "uninstall")
    assert installed("-c", shown, on=False).stdout.split() == off


def test_an_active_alias_loads_only_its_own_modules(installed):
    shown = "import sys; print(*sorted(sys.modules))"
    added = set(installed("-c", shown).stdout.split()) - set(installed("-c", shown, on=False).stdout.split())
    assert added == {"elasticrs", "elasticrs.alias", "__future__"}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("torch.distributed.elastic", "elasticrs"),
        ("torch.distributed.elastic.timer.api", "elasticrs.timer.api"),
        ("torch.distributed.launcher.api", "elasticrs.launcher.api"),
        ("torch.distributed.run", "elasticrs.run"),
        ("torch.distributed.launch", "elasticrs.launch"),
        ("torchelastic", "elasticrs.train"),
        ("torchelastic.p2p", "elasticrs.train.p2p"),
        ("torchelastic.timer.api", "elasticrs.timer.api"),
        ("torchelastic.utils.data", "elasticrs.utils.data"),
        ("torchelastic_of_others", None),
        ("torch.distributed.elastic_of_others", None),
        ("torch.distributed.runner", None),
        ("torch.distributed.checkpoint", None),
        ("torch", None),
    ],
)
def test_torch_module_names_are_mapped_to_elasticrs_names(theirs, ours):
    assert our_name(theirs) == ours


SAME = """
import importlib, sys
before = {}
for name in ("", ".timer", ".timer.api", ".agent.server", ".rendezvous.api", ".multiprocessing.errors"):
    before[name] = importlib.import_module("elasticrs" + name)
specs = {name: module.__spec__ for name, module in before.items()}
for name, module in before.items():
    assert importlib.import_module("torch.distributed.elastic" + name) is module, name
    assert module.__spec__ is specs[name] and module.__name__ == "elasticrs" + name, module.__spec__
import torch.distributed.run, torch.distributed.launch, torch.distributed.launcher.api as api
import elasticrs.launcher.api, elasticrs.run, elasticrs.launch
assert torch.distributed.run is elasticrs.run
assert torch.distributed.launch is elasticrs.launch
assert api is elasticrs.launcher.api
# The other way about: first by torch's name.
from torch.distributed.elastic.utils import log_level
import elasticrs.utils.log_level
assert log_level is elasticrs.utils.log_level
from unittest.mock import patch
with patch("torch.distributed.elastic.timer.api.expires", 1):
    assert elasticrs.timer.api.expires == 1
assert importlib.util.find_spec("torch.distributed.elastic.no_such_module") is None
try:
    import torch.distributed.elastic.no_such_module
except ModuleNotFoundError as error:
    assert error.name == "torch.distributed.elastic.no_such_module"
files = [getattr(module, "__file__", None) or "" for module in sys.modules.values()]
assert not [file for file in files if "torch/distributed/elastic" in file], files
print("done")
"""


ATTRIBUTES = """
import torch.distributed.run, torch
error = torch.distributed.elastic.multiprocessing.errors.ChildFailedError
assert error.__module__ == "elasticrs.multiprocessing.errors", error
assert torch.distributed.launcher.api.elastic_launch.__module__ == "elasticrs.launcher.api"
import torch.distributed.launcher as pet
print(pet.api.__name__)
"""


# Import torch once for all programs.
IN_FORKS = """
import os, sys
import torch
for program in sys.argv[1:]:
    if os.fork() == 0:
        exec(program)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


@pytest.mark.torch
def test_torch_and_elasticrs_names_refer_to_the_same_module(installed):
    done = installed("-W", "error", "-c", IN_FORKS, SAME, ATTRIBUTES, check=False)
    assert done.stdout == "done\nelasticrs.launcher.api\n", done.stderr


NEWER = """
from torch.distributed.elastic.timer import api
OURS = api.__name__
"""

PROBES = """
import importlib.util
import torch.distributed.elastic.newer.helpers as helpers, torch.distributed.run
from torch.distributed.elastic.newer import OURS
print(OURS, helpers.__name__, torch.distributed.run.__name__)
assert importlib.util.find_spec("torch.distributed.elastic.neither") is None
assert importlib.util.find_spec("torch.distributed.elastic.timer.neither") is None
"""


@pytest.fixture
def small_torch(tmp_path):
    """Create a package in place of torch that has only a package that a later version of torch could have."""
    packages = ("torch", "torch/distributed", "torch/distributed/elastic", "torch/distributed/elastic/newer")
    for package in packages:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(NEWER if package.endswith("newer") else "")
    (tmp_path / packages[-1] / "helpers.py").touch()


@pytest.mark.usefixtures("small_torch")
def test_a_module_that_only_torch_has_is_loaded_from_torch(installed, tmp_path):
    done = installed("-c", PROBES, check=False, PYTHONPATH=str(tmp_path))
    assert done.stdout == "elasticrs.timer.api torch.distributed.elastic.newer.helpers elasticrs.run\n", (
        done.stderr
    )


OF_2019 = """
import importlib.util, sys
import torchelastic
import torchelastic.checkpoint as checkpoint
import torchelastic.distributed as edist
import torchelastic.metrics, torchelastic.event_logger, torchelastic.fault_injection
from torchelastic.timer import expires
from torchelastic.utils.data import CyclingIterator
import elasticrs.train
assert torchelastic is elasticrs.train and torchelastic.train is elasticrs.train.train
assert checkpoint is elasticrs.train.checkpoint and edist.__name__ == "elasticrs.train.distributed"
assert importlib.util.find_spec("torchelastic.no_such_module") is None
assert "torch" not in sys.modules
print(torchelastic.__version__ and "done")
"""


def test_torchelastic_imports_resolve_to_elasticrs_train(installed):
    done = installed("-W", "error", "-c", OF_2019, check=False)
    assert done.stdout == "done\n", done.stderr


SPAWNED = """
import multiprocessing

def module_of(connection):
    from torch.distributed.elastic.timer import TimerRequest
    connection.send(TimerRequest.__module__)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe()
    child = context.Process(target=module_of, args=(other,))
    child.start()
    other.close()
    print(mine.recv())
    child.join()
"""


@pytest.mark.torch
@pytest.mark.slow
def test_the_alias_is_active_in_spawned_children(installed, tmp_path):
    before = procs.children()
    (tmp_path / "spawned.py").write_text(SPAWNED, encoding="utf-8")
    assert installed("spawned.py").stdout == "elasticrs.timer.api\n"
    # Reap multiprocessing's resource tracker, which outlives the program for a moment.
    procs.reap_adopted(keep=[child.pid for child in before])


SHOW = """
import os, sys
shown = [os.environ["RANK"], str("ELASTICRS_ROUND" in os.environ), *sys.argv[1:]]
os.write(1, " ".join(shown).encode() + b"\\n")
"""


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["torchrun"], ["0 True --x", "1 True --x"]),
        (["-m", "torch.distributed.run"], ["0 True --x", "1 True --x"]),
        (["-m", "torch.distributed.launch", "--use-env"], ["0 True --x", "1 True --x"]),
        (["-m", "torch.distributed.launch"], ["0 True --local-rank=0 --x", "1 True --local-rank=1 --x"]),
    ],
)
def test_launch_commands_of_torch_start_the_elasticrs_launcher(installed, tmp_path, command, expected):
    (tmp_path / "worker.py").write_text(SHOW, encoding="utf-8")
    # An installation of torch puts this script beside the interpreter.
    (tmp_path / "torchrun").write_text("import sys; from torch.distributed.run import main; sys.exit(main())")
    done = installed("-W", "error", *command, "--nproc-per-node=2", "worker.py", "--x", check=False)
    assert sorted(done.stdout.splitlines()) == expected, done.stderr
    assert done.returncode == 0


@pytest.mark.usefixtures("small_torch")
def test_a_worker_that_imports_torch_elastic_gets_elasticrs(installed, tmp_path):
    source = "from torch.distributed.elastic.multiprocessing.errors import record; print(record.__module__)"
    (tmp_path / "worker.py").write_text(source, encoding="utf-8")
    done = installed("-m", "elasticrs", "worker.py", check=False, PYTHONPATH=str(tmp_path))
    assert done.stdout == "elasticrs.multiprocessing.errors\n", done.stderr


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["a.py"], ["a.py", "--local-rank=${local_rank}"]),
        (["-m", "a", "-m", "b"], ["-m", "a", "--local-rank=${local_rank}", "-m", "b"]),
        (["--use_env", "a.py", "b"], ["--use_env", "a.py", "b"]),
        (["--no-such", "a.py", "b"], ["--no-such", "a.py", "b"]),
        (["--help"], ["--help"]),
        (["--check", "torchrun", "a.py"], ["--check", "torchrun", "a.py"]),
        ([], []),
    ],
)
def test_with_local_rank_inserts_the_option_after_the_script(argv, expected):
    assert with_local_rank(argv) == expected


LATE = """
import sys, elasticrs.alias
sys.modules["torch.distributed.run"] = sys
elasticrs.alias.activate()
"""


def test_activating_the_alias_after_torch_modules_are_loaded_fails(run):
    done = run("-c", LATE, on=False, check=False)
    assert done.returncode == 1
    assert "torch.distributed.run " in done.stderr
