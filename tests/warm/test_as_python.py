"""For programs made of random modules, ``--warm auto`` finds exactly the modules that Python imports when it
runs them.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from helpers.procs import run_program
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrs._engine.workers.warm import modules as warm

LIBRARY = tuple(f"library{number}" for number in range(6))
"""Modules in another folder."""
FILES = (
    "main.py", "beside.py", "space/deep.py", "pkg/__init__.py", "pkg/run.py", "pkg/a.py", "pkg/b.py",
    "pkg/sub/__init__.py", "pkg/sub/c.py",
)  # fmt: skip
MODULES = ("beside", "space", "space.deep", "pkg", "pkg.a", "pkg.b", "pkg.sub", "pkg.sub.c", "pkg.none")
STATEMENTS = (
    *(f"import {name}" for name in (*MODULES, *LIBRARY, "missing")),
    *("from pkg import a, sub", "from pkg.sub import c", "from space import deep", "from pkg import *"),
    *("from . import a", "from .sub import c", "from .b import x", "from .. import b", "from ..a import x"),
    *("from ... import a", "from .sub.c import x", "from library1 import x"),
)
TEXTS = st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=4).map(
    lambda lines: "".join(f"try:\n    {line}\nexcept ImportError:\n    pass\n" for line in lines)
)
PROGRAM = f"""
import atexit, runpy, sys
atexit.register(lambda: print(*({{*sys.modules}} & {{*{LIBRARY}}})))
sys.path[0] = sys.argv[1]
sys.path.append(sys.argv[1] + "/site-packages")
if sys.argv[2] == "-m":
    runpy.run_module(sys.argv[3], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[2], run_name="__main__")
"""


def imported(root, *arguments):
    command = [sys.executable, "-S", "-W", "ignore", "-c", PROGRAM, root, *arguments]
    done = run_program(command, check=True)
    return set(done.stdout.split())


@settings(max_examples=20, deadline=None)
@given(
    st.fixed_dictionaries(dict.fromkeys(FILES, TEXTS)), st.sampled_from(("main.py", "pkg.run", "pkg.sub.c"))
)
def test_warm_auto_finds_exactly_the_modules_that_python_imports(files, program):
    files = {**files, **dict.fromkeys((f"site-packages/{name}.py" for name in LIBRARY), "")}
    with TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        for name, text in files.items():
            path = Path(root, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        patch.chdir(root)
        arguments = [program] if program == "main.py" else ["-m", program]
        chosen = warm.preload("auto", warm.entry_of_command([sys.executable, *arguments])).modules
        found = {name.partition(":")[0] for name in chosen} - {"missing"}
        assert found == imported(root, *arguments)
