"""Tests for the modules that ``--warm`` finds in the source, without running or importing anything."""

import errno
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from helpers.procs import run_program
from helpers.said import says
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrs._engine.job.config import UsageError
from elasticrs._engine.workers.warm import modules as warm
from elasticrs._engine.workers.warm.steps import Import, steps


def imports(source, package=""):
    """Return the names of the modules that a source imports, without duplicates."""
    return list(dict.fromkeys(step.name for step in steps(source, package) if isinstance(step, Import)))


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a file into the folder of the script."""

    def write(name, text=""):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def of_script(path, value="auto"):
    return warm.preload(value, warm.entry_of_command([sys.executable, "-u", path]))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import a.b as c, d", ["a.b", "d"]),
        ("from a.b import c, d as e", ["a.b", "a.b:c", "a.b:d"]),
        ("from a import *", ["a", "a:*"]),
        ("import a\nimport a\nfrom a import a", ["a", "a:a"]),
        ("from . import a\nfrom .b import c\nfrom .. import d\nimport e", ["e"]),
        ("if x:\n import a\nelif y:\n import b\nelse:\n import c", ["a", "b", "c"]),
        (
            "try:\n import a\nexcept E:\n import b\nelse:\n import c\nfinally:\n import d",
            ["a", "b", "c", "d"],
        ),
        ("with x:\n for y in z:\n  while 1:\n   import a", ["a"]),
        ("match x:\n case 1:\n  import a", ["a"]),
        ("def f():\n import a\nasync def g():\n import b\nclass C:\n import c\nx = lambda: y", []),
        ("if TYPE_CHECKING:\n import a\nelse:\n import b", ["b"]),
        ("if typing.TYPE_CHECKING:\n import a\nelif x:\n import b", ["b"]),
        ("if not TYPE_CHECKING:\n import a\nelse:\n import b", ["a"]),
        ("if x and TYPE_CHECKING:\n import a", ["a"]),
        ('"""import a"""\n# import b\nx = "import c"', []),
        ("import a if x else b", None),
        ("import a\0", None),
    ],
)
def test_imports_are_found_in_a_source(source, found):
    if found is None:
        with pytest.raises((SyntaxError, ValueError)):
            imports(source.encode())
    else:
        assert imports(source.encode()) == found


HEADS = st.sampled_from((
    "if x:", "try:", "with x:", "for x in y:", "while x:", "if TYPE_CHECKING:", "def f():", "class C:",
))  # fmt: skip


@given(st.lists(st.tuples(st.lists(HEADS, max_size=12), st.booleans()), max_size=8))
def test_imports_are_not_found_in_functions_classes_and_type_checking(statements):
    lines, expected = [], []
    for number, (heads, is_from) in enumerate(statements):
        lines += [" " * depth + head for depth, head in enumerate(heads)]
        deep = " " * len(heads)
        lines.append(deep + (f"from a import b{number}" if is_from else f"import a.b{number}"))
        for depth in reversed(range(len(heads))):
            if heads[depth] == "try:":
                lines.append(" " * depth + "finally: pass")
        if not {"if TYPE_CHECKING:", "def f():", "class C:"}.intersection(heads):
            expected += ["a", f"a:b{number}"] if is_from else [f"a.b{number}"]
    assert imports("\n".join(lines).encode()) == list(dict.fromkeys(expected))


def test_a_long_elif_chain_does_not_exceed_the_recursion_limit():
    source = "if x: pass\n" + "elif x: pass\n" * 900 + "else:\n import a\n"
    assert imports(source.encode()) == ["a"]


def test_parsing_a_source_emits_no_warnings(recwarn):
    assert imports(b"import a\nx = '\\d'\nassert (x, y)\n1 is 1") == ["a"]
    assert not recwarn


def test_the_users_own_modules_are_not_preloaded(write):
    write("model.py")
    write("lib/__init__.py")
    write("json/data.txt")
    write("tools/deep.py")
    source = "import json, model, lib.deep\nfrom lib import x\nimport tools.deep, train, torch, __future__\n"
    path = write("train.py", source)
    assert of_script(path) == warm.Preload(("json", "torch"), folders=(os.path.dirname(path),))
    linked = os.path.join(os.path.dirname(path), "elsewhere")
    os.mkdir(linked)
    os.symlink(path, os.path.join(linked, "link.py"))
    assert of_script(os.path.join(linked, "link.py")) == of_script(path)


def test_imports_of_the_users_own_modules_are_preloaded(write):
    write("model/__init__.py", "from . import layers\nfrom .deep.net import Net\nimport train")
    write("model/layers.py", "import csv\nfrom ..outside import x\nfrom model import deep")
    write("model/deep/net.py", "from ..losses import y\nfrom ... import z\nimport bz2")
    write("model/losses.py", "from torch import nn\nnn.parallel.DistributedDataParallel")
    write("model/unused.py", "import ast")
    write("tools/data.py", "import model.layers, wave")
    write("broken.py", "import cmd\n(")
    path = write("train.py", "from tools import data\nfrom model import Net\nimport json, broken")
    expected = ("csv", "torch", "torch:nn", "bz2", "json", "wave", "torch._dynamo")
    assert of_script(path).modules == expected


def test_own_modules_are_read_only_up_to_a_size_limit(write):
    for number in range(30):
        lines = f"import only{number}, own{number + 1}\n" + "# " + "x" * 50_000
        write(f"own{number}.py", lines)
    found = of_script(write("train.py", "import own0\nimport json"))
    assert found.modules == tuple(f"only{number}" for number in range(11))
    [remark] = found.remarks
    says(remark, "own11.py", " json ")


def test_a_script_is_decoded_as_python_decodes_it(write):
    assert of_script(write("a.py", b"# coding: latin-1\nx = '\xe9'\nimport json\n")).modules == ("json",)
    assert of_script(write("b.py", b"\xef\xbb\xbfimport json\r\nimport os\r\n")).modules == ("json", "os")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import json\nx = )", "line 2: "),
        *((text, "") for text in (b"x = '\xe9'", b"import a\0b", b"# coding: nope\n", "(" * 5000)),
    ],
)
def test_a_script_that_cannot_be_parsed_preloads_nothing(write, text, why):
    chosen = of_script(write("train.py", text))
    assert chosen.modules == ()
    [remark] = chosen.remarks
    says(remark, "train.py", "parsed", why)


def test_a_script_that_cannot_be_read_preloads_nothing(write, tmp_path):
    missing = of_script(str(tmp_path / "no.py"))
    says(missing.remarks[0], "no.py", os.strerror(errno.ENOENT))
    os.mkfifo(tmp_path / "pipe")
    says(of_script(str(tmp_path / "pipe")).remarks[0], "pipe", "not a file")
    alone = of_script(write("train.py", "print('hello')"))
    assert alone.modules == ()
    says(alone.remarks[0], "train.py", "nothing")


def test_the_main_program_of_a_folder_is_read(write, tmp_path):
    write("model.py")
    write("app/__main__.py", "import json, model, other")
    write("app/other.py")
    assert of_script(str(tmp_path / "app")).modules == ("json", "model")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch.distributed.init_process_group('gloo')", []),
        ("from torch.optim import SGD", ["torch._dynamo"]),
        (
            "import torch\ndef f():\n return torch.nn.parallel.DistributedDataParallel(model)",
            ["torch._dynamo"],
        ),
        ("from torch.distributed.fsdp import fully_shard", ["torch._dynamo"]),
        ("import torch\nx = torch.compile(x)", ["torch._inductor.compile_fx"]),
        ("import torch\nre.compile(x)", []),
        ("from scipy import optim\noptim", []),
    ],
)
def test_lazy_torch_imports_are_inferred_from_the_source(write, source, names):
    modules = of_script(write("train.py", source)).modules
    assert [name for name in modules if name.startswith("torch._")] == names


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("os.environ['TORCH_COMPILE_DISABLE'] = '1'", None),
        ("def f(): os.environ['MASTER_PORT'] = os.environ['TORCHELASTIC_RUN_ID'] + '1'", None),
        ("def f(): os.environ['TORCH_COMPILE_DISABLE'] = '1'", "TORCH_COMPILE_DISABLE"),
        ("def f(): os.environ.update(settings)", "environ.update"),
        ("def f(): dotenv.load_dotenv()", "load_dotenv"),
    ],
)
def test_dynamo_is_not_preloaded_if_a_function_may_configure_it(write, lines, why):
    found = of_script(write("train.py", f"import os, torch\n{lines}\ntorch.optim.SGD\n"))
    assert ("torch._dynamo" in found.modules) == (why is None)
    told = [why in remark and "torch._dynamo" in remark for remark in found.remarks]
    assert told == ([] if why is None else [True])


@pytest.mark.parametrize(
    ("arguments", "modules"),
    [
        (["train.py", "-m", "x"], ("json",)),
        (["-u", "-X", "dev", "-Wd", "-W", "error", "train.py"], ("json",)),
        (["-uB", "--", "train.py"], ("json",)),
        (["--check-hash-based-pycs", "never", "train.py"], ("json",)),
        (["-um", "pkg.run"], ("heapq", "csv", "json", "ftplib")),
        (["-m", "pkg"], ("heapq", "bz2")),
        (["-m", "space.deep.run"], ("ast",)),
        (["-m", "json.tool"], ("json", "argparse", "sys")),
    ],
)
def test_the_program_in_a_python_command_line_is_found(write, tmp_path, monkeypatch, arguments, modules):
    write("train.py", "import json")
    write("pkg/__init__.py", "import heapq\nraise SystemExit('imported')")
    write("pkg/__main__.py", "import bz2")
    write("pkg/model.py", "from . import deeper")
    write("pkg/deeper.py", "from .model import x\nimport ftplib")
    write("pkg/run.py", "import csv, train\nfrom . import model")
    write("space/deep/run.py", "import ast, space.deep.run")
    monkeypatch.chdir(tmp_path)
    found = warm.preload("auto", warm.entry_of_command([sys.executable, *arguments]))
    assert found.modules[: len(modules)] == modules, found


def test_modules_of_an_installed_package_are_not_own_modules(write, tmp_path, monkeypatch):
    write("site-packages/pkg/__init__.py")
    write("site-packages/pkg/run.py", "import pkg.model, other")
    write("site-packages/other.py")
    write("src/pkg2/__init__.py")
    write("src/pkg2/run.py", "import pkg2.model, own, json")
    write("src/own.py")
    for folder in ("site-packages", "src"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    command = [sys.executable, "-m"]
    assert warm.preload("auto", warm.entry_of_command([*command, "pkg.run"])).modules == (
        "pkg",
        "pkg.model",
        "other",
    )
    assert warm.preload("auto", warm.entry_of_command([*command, "pkg2.run"])).modules == ("json",)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["/bin/true"], "true "),
        ([sys.executable, "-uI", "train.py"], "-I"),
        ([sys.executable, "-S", "train.py"], "-S"),
    ],
)
def test_other_programs_and_isolated_interpreters_preload_nothing(command, why):
    found = warm.preload("torch", warm.entry_of_command(command))
    assert found == warm.Preload(remarks=found.remarks)
    (remark,) = found.remarks
    says(remark, "no effect", why)


@pytest.mark.parametrize("arguments", [["-"], ["-u"], ["-c", "import json"], ["-m", "no.such"], ["-m", ""]])
def test_a_program_without_a_file_preloads_only_listed_modules(arguments):
    found = warm.preload("auto", warm.entry_of_command([sys.executable, *arguments]))
    assert found.modules == ()
    says(found.remarks[0], "no source file")
    assert warm.preload("json", warm.entry_of_command([sys.executable, *arguments])).modules == ("json",)


def test_listed_modules_are_preloaded_as_given(write):
    path = write("train.py", "import csv")
    found = warm.Preload(("json", "json.tool"), is_explicit=True, folders=(os.path.dirname(path),))
    assert of_script(path, "json, json.tool,json") == found
    with pytest.raises(UsageError, match="'nosuch'"):
        of_script(path, "json,nosuch.deep")
    # Accept the module, because only importing the package can show whether it exists.
    assert of_script(path, "json.nosuch").modules == ("json.nosuch",)


def test_a_listed_module_beside_the_script_is_left_out(write):
    write("model.py")
    write("tools/deep.py")
    path = write("train.py")
    found = of_script(path, "model.deep,json,tools.deep")
    assert found.modules == ("json",)
    for remark, name in zip(found.remarks, ("model.deep", "tools.deep"), strict=True):
        says(remark, f"{name} ", path)


def test_a_listed_module_is_not_checked_for_another_interpreter(write, monkeypatch):
    path = write("train.py")
    monkeypatch.setenv("PYTHON_EXEC", "other-python")
    entry = warm.entry_of_command(["other-python", path])
    assert warm.preload("nosuch", entry).modules == ("nosuch",)


def test_the_module_of_a_function_is_searched_for_imports():
    entry = warm.entry_of_function(test_the_module_of_a_function_is_searched_for_imports, (), "spawn")
    assert entry.path == __file__
    assert {"os", "sys", "pytest"} <= set(warm.preload("auto", entry).modules)
    builtin = warm.entry_of_function(print, (), "spawn")
    assert warm.preload("auto", builtin).modules == ()
    for method in ("fork", "forkserver"):
        cold = warm.preload("json", warm.entry_of_function(print, (), method))
        assert cold.modules == ()
        says(cold.remarks[0], "no effect", "fork")


def test_the_script_of_run_path_is_searched_for_imports(write):
    from elasticrs.run import run_script_path

    path = write("train.py", "import json")
    found = warm.preload("auto", warm.entry_of_function(run_script_path, (path, "--x"), "spawn"))
    assert found.modules == ("json",)
    assert warm.entry_of_function(run_script_path, (path,), "fork").why_cold is not None


# --- comparison with what Python imports ---

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


def imported_by_python(root, *arguments):
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
        assert found == imported_by_python(root, *arguments)
