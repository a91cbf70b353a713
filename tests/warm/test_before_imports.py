"""Code that a script runs before its imports has the same effect under ``--warm auto`` as in a cold start."""

import importlib.util
import re

import pytest
from helpers.said import has

from elasticrs._engine.workers.warm import modules as warm

pytestmark = pytest.mark.beyond_torchrun

LIBRARY = """
import os, sys, warnings
MODE = os.environ.get("LIBRARY_MODE", "default")
BLAS = os.environ.get("OPENBLAS_NUM_THREADS", "default")
WHERE = sys.path[-1]
FILTERS = str(warnings.filters[:1])
"""
SECOND = """
import os
MODE = os.environ.get("LIBRARY_MODE", "default")
"""
PORT = """
import os
MODE = os.environ["MASTER_PORT"]
"""
SHOW = """
import os
os.write(1, f"{os.environ['RANK']} {at_start} {seen} {os.environ.get('LIBRARY_MODE')}\\n".encode())
"""
AT_START = """
import builtins, os, sys
builtins.at_start = os.environ.get("LIBRARY_MODE")
with open(f"warm.{os.environ['RANK']}", "w") as file:
    file.write(str("a_library" in sys.modules))
"""
"""The workers' ``sitecustomize``, which runs before the script and records the state at that time."""


@pytest.fixture
def compare(launch, tmp_path, worker_script):
    """Return a function that runs a script cold and warm, and compares the two runs."""

    def run(text, modes=("off", "auto"), env=None, command=None, nproc=2, **files):
        folder = tmp_path / "library"
        folder.mkdir()
        (folder / "a_library.py").write_text(LIBRARY)
        (folder / "b_library.py").write_text(SECOND)
        (folder / "port_library.py").write_text(PORT)
        (folder / "sitecustomize.py").write_text(AT_START)
        for name, content in files.items():
            (tmp_path / f"{name}.py").parent.mkdir(exist_ok=True)
            (tmp_path / f"{name}.py").write_text(content)
        script = worker_script(text + SHOW)
        shown = []
        for mode in modes:
            for old in tmp_path.glob("warm.*"):
                old.unlink()
            options = (f"--nproc-per-node={nproc}", f"--warm={mode}", *(command or (script,)))
            job = launch(*options, env={**(env or {}), "PYTHONPATH": f"{folder}:lib"}, cwd=tmp_path).exits(0)
            shown.append(sorted(job.stdout.splitlines()))
        assert shown[0] == shown[1]
        assert len(shown[0]) == nproc
        preloaded = {path.read_text() for path in tmp_path.glob("warm.*")}
        remarks = re.findall(r"warm: (.*)", job.stderr)
        return shown[0], preloaded, remarks

    return run


KNOWN = {
    "a constant": 'import os\nos.environ["LIBRARY_MODE"] = "fast"\n',
    "another name": 'import os as o\no.environ["LIBRARY_MODE"] = "fast"\n',
    "from os": 'from os import environ\nenviron["LIBRARY_MODE"] = "fast"\n',
    "an alias": 'import os\nenv = os.environ\nenv["LIBRARY_MODE"] = "fast"\n',
    "two targets": 'import os\nos.environ["OTHER"] = os.environ["LIBRARY_MODE"] = "fast"\n',
    "twice": 'import os\nos.environ["LIBRARY_MODE"] = "slow"\nos.environ["LIBRARY_MODE"] = "fast"\n',
    "after harmless lines": (
        "import logging, os\nfrom pathlib import Path\nlogger = logging.getLogger(__name__)\n"
        "ROOT = Path(__file__).resolve().parent\nNAMES = {}\nNAMES['a'] = [len(name) for name in ()]\n"
        "def f(x=1): os.environ['LIBRARY_MODE'] = 'never'\nclass C:\n    x = 1\n    def g(self): f()\n"
        'try:\n    import no_such_module\nexcept ImportError:\n    logger.debug("none")\n'
        'os.environ["LIBRARY_MODE"] = "fast"\n'
    ),
    "main program": 'import os\nif __name__ == "__main__":\n    os.environ["LIBRARY_MODE"] = "fast"\n',
    "beside": "import mine\n",
    "threads": 'import os\nos.environ["OPENBLAS_NUM_THREADS"] = "7"\n',
    "a port": 'import os\nos.environ["MASTER_PORT"] = "12345"\nimport port_library\n',
}
IMPORTS = "import a_library\nseen = a_library.MODE, a_library.BLAS, a_library.WHERE, a_library.FILTERS\n"


@pytest.mark.parametrize("how", KNOWN)
def test_a_scripts_environment_variables_apply_while_its_imports_are_preloaded(compare, how):
    mine = 'import os\nos.environ["LIBRARY_MODE"] = "fast"\n'
    shown, preloaded, remarks = compare(
        KNOWN[how] + IMPORTS,
        env={"LIBRARY_MODE": "from outside"},
        mine=mine,
    )
    assert preloaded == {"True"}, remarks
    assert remarks == []
    expected = {"threads": "'from outside', '7'", "a port": "'from outside'"}.get(how, "'fast'")
    assert f"0 from outside ({expected}" in shown[0]


UNKNOWN = {
    "setdefault": 'os.environ.setdefault("LIBRARY_MODE", "fast")',
    "update": 'os.environ.update(LIBRARY_MODE="fast")',
    "or": 'os.environ |= {"LIBRARY_MODE": "fast"}',
    "putenv": 'os.putenv("LIBRARY_MODE", "fast")',
    "a call": 'os.environ["LIBRARY_MODE"] = str(2 + 3)',
    "a rank": 'os.environ["LIBRARY_MODE"] = os.environ["RANK"]',
    "a function": 'def f(): os.environ["LIBRARY_MODE"] = "fast"\nf()',
    "a decorator": 'def f(g): os.environ["LIBRARY_MODE"] = "fast"\n@f\ndef g(): pass',
    "a class": 'class C:\n    os.environ["LIBRARY_MODE"] = "fast"',
    "a branch": 'if len(sys.argv) < 9:\n    os.environ["LIBRARY_MODE"] = "fast"',
    "a try": 'try:\n    os.environ["LIBRARY_MODE"] = "fast"\nexcept OSError:\n    pass',
    "a loop": 'for name in ("LIBRARY_MODE",):\n    os.environ[name] = "fast"',
    "a removal": 'del os.environ["LIBRARY_MODE"]',
    "filters": 'import warnings\nwarnings.simplefilter("ignore", UserWarning)',
    "a path": 'sys.path.append(os.environ.get("ADDED", "/added"))',
    "a path of two": 'sys.path.extend(["/added"])',
    "a path by another name": 'paths = sys.path\npaths += ["/added"]',
    "a patched module": "import csv\ncsv.mine = 1",
    "arguments": "import argparse\nargparse.ArgumentParser().parse_known_args()",
    "a context": (
        "import contextlib\n@contextlib.contextmanager\ndef f():\n"
        '    os.environ["LIBRARY_MODE"] = "fast"\n    yield\nwith f():\n    pass'
    ),
    "beside": "import mine",
    "beside in function": "import harmless\nharmless.f()",
}


@pytest.mark.parametrize("how", UNKNOWN)
def test_imports_after_an_unknown_statement_are_not_preloaded(worker_script, library, monkeypatch, how):
    monkeypatch.syspath_prepend(library(a_library=LIBRARY)["PYTHONPATH"])
    worker_script('import os\nos.environ.update(LIBRARY_MODE="fast")\n', "mine.py")
    worker_script('import os\ndef f():\n    os.environ["LIBRARY_MODE"] = "fast"\n', "harmless.py")
    script = worker_script(f"import os, sys\n{UNKNOWN[how]}\n{IMPORTS}")
    found = warm.preload("auto", warm.entry_of_script(str(script)))
    assert "a_library" not in found.modules
    (remark,) = found.remarks
    assert re.search(r"\.py, line \d+ \(.+\) .*a_library", remark)


def test_nothing_is_said_about_modules_that_every_interpreter_has_imported(compare):
    _, _, remarks = compare("import csv, sys\nsys.setrecursionlimit(5000)\nimport os.path, time\nseen = 1\n")
    assert remarks == []


def test_imports_before_an_unknown_statement_are_preloaded(compare):
    text = (
        "import a_library, os\nos.environ.setdefault('LIBRARY_MODE', 'fast')\nimport b_library\n"
        "seen = a_library.MODE, b_library.MODE\n"
    )
    shown, preloaded, remarks = compare(text)
    assert "('default', 'fast')" in shown[0]
    assert preloaded == {"True"}
    assert len(remarks) == 1
    assert "b_library" in remarks[0]
    assert "a_library" not in remarks[0].replace("b_library", "")


def test_a_module_that_changes_a_script_variable_is_left_out(compare):
    text = "import os\nos.environ['LIBRARY_MODE'] = 'fast'\nimport changes, a_library\n"
    text += "seen = a_library.MODE, changes.before\n"
    library = "import os\nbefore = os.environ['LIBRARY_MODE']\nos.environ['LIBRARY_MODE'] = 'changed'\n"
    shown, _, remarks = compare(text, **{"lib/changes": library})
    assert "('changed', 'fast') changed" in shown[0]
    assert any(has(remark, "changes ", "LIBRARY_MODE") for remark in remarks)


PACKAGE = {
    "pkg/__init__": "import os\nos.environ['LIBRARY_MODE'] = 'fast'\n",
    "pkg/run": "import os, a_library\nseen = a_library.MODE\n" + SHOW,
}


@pytest.mark.parametrize(
    ("mode", "command", "files"),
    [("a_library", None, {}), ("auto", ("-m", "pkg.run"), PACKAGE)],
    ids=["listed modules", "package of the main module"],
)
def test_modules_see_the_variables_that_are_set_before_their_import(compare, mode, command, files):
    text = "import os\nos.environ['LIBRARY_MODE'] = 'fast'\nimport a_library\nseen = a_library.MODE\n"
    shown, preloaded, remarks = compare(text, ("off", mode), command=command, **files)
    assert "fast" in shown[0]
    assert (preloaded, remarks) == ({"True"}, [])


PATHS = {
    "text": 'sys.path.insert(0, "more")',
    "os.path": 'sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "more"))',
    "appended": 'HERE = os.path.dirname(__file__)\nsys.path.append(HERE + "/more" if 0 else f"{HERE}/more")',
    "pathlib": 'ROOT = Path(__file__).resolve().parent\nsys.path.insert(0, str(ROOT / "more"))',
    "parents": 'sys.path.insert(0, str(Path(__file__).resolve().parents[0] / "more"))',
}


@pytest.mark.parametrize("how", PATHS)
def test_modules_in_a_folder_that_a_script_adds_to_sys_path_are_own_modules(compare, how):
    text = f"import os, sys\nfrom pathlib import Path\n{PATHS[how]}\nimport a_library, mine, b_library\n"
    files = {
        "more/mine": "import os\nos.environ['LIBRARY_MODE'] = 'fast'\n",
        "more/b_library": "MODE = 'mine'\n",
    }
    shown, preloaded, remarks = compare(text + "seen = a_library.MODE, b_library.MODE\n", **files)
    assert "fast" in shown[0]
    is_known = how != "appended"
    assert preloaded == {str(is_known)}, remarks
    assert len(remarks) == (not is_known)


BACK_END = """
import os
os.environ["MPLBACKEND"] = "svg"
import matplotlib.pyplot
seen = matplotlib.get_backend()
"""
USES = """
import matplotlib
matplotlib.use("pdf")
import matplotlib.pyplot
seen = matplotlib.get_backend()
"""
THREADS = """
import os
os.environ["OPENBLAS_NUM_THREADS"] = "{count}"
import numpy, ctypes
with open("/proc/self/maps") as maps:
    paths = {{line.split()[-1] for line in maps if "openblas" in line}}
names = [f"{{p}}openblas_get_num_threads{{s}}" for p in ("", "scipy_") for s in ("", "64_")]
libraries = [ctypes.CDLL(path) for path in paths]
seen = [getattr(each, name)() for each in libraries for name in names if hasattr(each, name)]
"""


def needs(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {module}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(BACK_END, "svg", marks=needs("matplotlib")),
        pytest.param(USES, "pdf", marks=needs("matplotlib")),
        pytest.param(THREADS.format(count=1), "", marks=needs("numpy")),
        pytest.param(THREADS.format(count=2), "", marks=needs("numpy")),
        pytest.param(THREADS.format(count=64), "", marks=needs("numpy")),
        pytest.param("import numpy\n" + THREADS.format(count=2), "", marks=needs("numpy")),
    ],
    ids=["back end", "use", "one thread", "two threads", "many threads", "too late"],
)
def test_settings_before_imports_affect_matplotlib_and_numpy(compare, text, expected):
    shown, _, _ = compare(text, nproc=1)
    assert expected in shown[0]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_settings_before_imports_affect_torch(compare):
    text = (
        "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nos.environ['TORCH_COMPILE_DISABLE'] = '1'\n"
        "import torch\nthreads = torch.get_num_threads()\n"
        "torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)\n"
        "import torch._dynamo\nseen = [threads, torch._dynamo.config.disable]\n"
    )
    shown, _, _ = compare(text)
    assert "[2, True]" in shown[0]
