"""Choose the modules to import once for all workers: those that the user names, or that the workers import.

Source files are parsed, never run. Imports at the top level count, even inside ``if``, ``try`` or loops, but
not imports in functions and classes, or for type checkers. The user's own modules are parsed, not preloaded.

The *nursery*, the process that imports the modules and then forks the workers, executes ``preload.steps`` in
order. Each step has one of three forms:

- ``a.b``: import the module as ``import a.b`` does.
- ``a.b:c``: import it as ``from a.b import c`` does, with all that ``a.b`` loads lazily for ``c``. A missing
  ``c`` causes no error here, because the script itself raises the error.
- ``NAME=value``: set an environment variable, because the script sets it before its next import.

If ``preload.is_explicit``, the user has named the modules, and a missing module is reported. Otherwise, it is
skipped silently, because the script may not import it (because of ``if``, ``try``, or a path that it adds).

``preload.folders`` contain the user's own modules, such as a ``profile.py`` beside the script. But
``torch._dynamo`` imports the standard library's ``profile``, and the script would then get that module, too.
So a module is left out if its import has loaded a module whose name also exists in these folders.
"""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from importlib.machinery import PathFinder

from elasticrs._engine.job.config import Preload, UsageError
from elasticrs._engine.job.phrases import printable
from elasticrs._engine.job.value import Value
from elasticrs._engine.workers.process import is_script_file, parse_python
from elasticrs._engine.workers.warm.steps import Folder, Import, Variable, steps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet
    from importlib.machinery import ModuleSpec
    from typing import Any

    from elasticrs._engine.workers.warm.steps import Unknown

LAZY: tuple[tuple[tuple[bytes, ...], str], ...] = (
    # On first use, optimizers, DDP, FSDP and checkpointing import about 900 modules of torch's compiler.
    (
        (
            b"optim",
            b"DistributedDataParallel",
            b"fully_shard",
            b"FullyShardedDataParallel",
            b"utils.checkpoint",
        ),
        "torch._dynamo",
    ),
    # `torch.compile` imports about 400 more modules, plus its code generators.
    ((b"torch.compile", b"torch_compile"), "torch._inductor.compile_fx"),
)
"""Words in a source file because of which torch imports a module lazily, and that module. Other parts of
torch, such as collectives and data loaders, import nothing lazily. These modules are preloaded only if such a
word occurs, because together they take 80 MB, and some of them, such as triton, print to stderr at exit.
"""

_READ_LAZILY = (
    rb"""["']((?!TORCH(?:ELASTIC|_NCCL|_DISTRIBUTED|_CPP|_HOME))"""
    rb"""(?:PYTORCH|TORCH|TRITON)[A-Z]*_[A-Z0-9_]+)["']"""
)
"""Environment variables that torch may read when it imports the modules in :data:`LAZY`."""
_SETS_ANY = (b"environ.update", b"putenv", b"load_dotenv")

_CANNOT_PARSE = (SyntaxError, ValueError, RecursionError, MemoryError)
_NEVER = ("__future__", "__main__")
_AT_START = frozenset(
    (
        *sys.builtin_module_names,
        *("_collections_abc", "_sitebuiltins", "abc", "codecs", "encodings", "genericpath", "io", "os"),
        *("posixpath", "site", "stat", "zipimport"),
    )
)
"""Modules that every Python interpreter imports before it runs a script."""
_WIDTH, _SHOWN = 60, 4
_ENOUGH = 1 << 19
"""Maximum number of bytes of source to parse, which delays the launch by 1 ms for each 5000 bytes."""


def preload(value: str, entry: Entry) -> Preload:
    """Choose the modules to preload. ``value`` is ``auto``, or a list of modules, separated by commas. Raise
    ``UsageError`` if this interpreter cannot find one of the modules.
    """
    if entry.why_cold is not None:
        return Preload(remarks=(f"no effect: {entry.why_cold}",))
    if value == "auto":
        return _of_source(entry)
    return _of_list([name.strip() for name in value.split(",")], entry)


def _of_list(names: Sequence[str], entry: Entry) -> Preload:
    chosen, remarks = [], []
    for name in dict.fromkeys(names):
        top = name.partition(".")[0]
        if is_beside(top, entry.folders):
            remarks.append(f"{name} was left out: it is next to {entry.name}, so each worker imports it")
        elif entry.interpreter is None and found_spec(top) is None:
            raise UsageError(f"there is no module {top!r}")
        else:
            chosen.append(name)
    plan = _Plan(entry)
    # Ignore errors, because the user has listed the modules. The script only tells which variables to set.
    with suppress(OSError, *_CANNOT_PARSE):
        plan.read_entry()
    tops = {_top(name) for name in chosen}
    variables = plan.variables_before(tops)
    late = [name for name in chosen if _top(name) in map(_top, plan.left_out)]
    if plan.unknown is not None and late:
        remarks.append(
            f"{plan.unknown} runs before the script imports {_listed(late)}, but cannot affect what --warm "
            "imports by name; use --warm auto if it has to"
        )
    return Preload((*variables, *chosen), is_explicit=True, remarks=tuple(remarks), folders=plan.folders)


def _of_source(entry: Entry) -> Preload:
    if entry.path is None:
        return _cold(
            f"{entry.name} has no source file that could be read; name the modules, for example --warm torch"
        )
    plan = _Plan(entry)
    try:
        plan.read_entry()
    except OSError as error:
        return _cold(f"{entry.path} cannot be read: {error.strerror}")
    except _CANNOT_PARSE as error:
        return _cold(f"{entry.path} cannot be parsed: {_reason(error)}")
    remarks = []
    tops = dict.fromkeys(map(_top, plan.left_out))
    # Do not mention modules that are not installed, because the script may import them optionally.
    late = [top for top in tops if entry.interpreter is not None or found_spec(top) is not None]
    if plan.unknown is not None and late:
        late.sort(key=sys.stdlib_module_names.__contains__)  # List the standard library's modules last.
        remarks.append(
            f"{plan.unknown} may change what later imports do, so each worker imports {_listed(late)} by "
            "itself; to preload them, import them before that line"
        )
    if not plan.modules:
        return Preload(
            remarks=tuple(remarks) or _cold(f"{entry.path} imports nothing but its own modules").remarks
        )
    lazy: list[str] = []
    text = plan.text
    if any(_top(name) == "torch" for name in plan.modules):
        found = [name for words, name in LAZY if any(word in text for word in words)]
        lazy = [name for name in found if name not in plan.modules]
    if lazy and (why := _why_not_lazily(text, {step.partition("=")[0] for step in plan.steps})):
        remarks.append(f"{_listed(lazy)} is imported by each worker, because the source {why}")
        lazy = []
    return Preload((*plan.steps, *lazy), remarks=tuple(remarks), folders=plan.folders)


class _Plan:
    """Preload steps, derived from the source of a script and of the user's own modules that it imports.
    ``unknown`` is the first statement whose effect is unknown, if any. ``steps`` and their ``modules`` are
    those before it, ``left_out`` are the modules that are imported after it. ``folders`` are those in which
    Python looks for modules, with those that the script adds to ``sys.path``.
    """

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self.folders = entry.folders
        self._sources: dict[str, bytes] = {}
        self._is_own = dict.fromkeys(_NEVER, True)
        self._read: set[tuple[str, bool]] = set()
        self.steps: list[str] = []
        self.modules: dict[str, None] = {}
        self.unknown: str | None = None
        self.left_out: dict[str, None] = {}

    @property
    def text(self) -> bytes:
        return b"\n".join(self._sources.values())

    def read_entry(self) -> None:
        """Read the script and the user's modules that it imports. Raise only if the script is unusable."""
        if self._entry.path is None:
            return
        if self._entry.package:
            self._import(Import(self._entry.package))
        self._read_source(self._entry.path, self._entry.package, is_main=self._entry.is_main)

    def variables_before(self, tops: AbstractSet[str]) -> list[str]:
        """Return the assignments to variables that precede the first import of these top-level modules."""
        found = []
        for step in self.steps:
            if "=" in step:
                found.append(step)
            elif _top(step) in tops:
                break
        return found

    def _read_source(
        self, file: str, package: str, *, is_main: bool = False, is_certain: bool = True
    ) -> None:
        self._read.add((file, is_main))
        self._sources[file] = b""
        self._sources[file] = source = _read(file)
        for step in steps(source, package, file=file, is_main=is_main):
            if isinstance(step, Import):
                self._import(step if is_certain else Import(step.name, is_certain=False))
            elif isinstance(step, Folder):
                self.folders = (*self.folders, step.path)
                self._is_own = dict.fromkeys(_NEVER, True)
            elif isinstance(step, Variable) and is_certain and self.unknown is None:
                self.steps.append(f"{step.name}={step.value}")
            elif self.unknown is None:
                self.unknown = _quoted(file, step)

    def _import(self, step: Import) -> None:
        name, top = step.name, _top(step.name)
        if top not in self._is_own:
            self._is_own[top] = is_beside(top, self.folders)
        if self._is_own[top]:
            self._import_own(step)
        elif self.unknown is not None:
            if name not in self.modules and top not in _AT_START:
                self.left_out[name] = None
        elif name not in self.modules:
            self.modules[name] = None
            self.steps.append(name)

    def _import_own(self, step: Import) -> None:
        for file, package in own_sources(step.name, self.folders):
            if (file, False) in self._read:
                continue
            if sum(map(len, self._sources.values())) >= _ENOUGH:
                self.unknown = (
                    self.unknown or f"{file}, which was not read because the sources are too large,"
                )
                return
            # Ignore the error here. The worker will report it when it imports that module.
            with suppress(OSError, *_CANNOT_PARSE):
                self._read_source(file, package, is_certain=step.is_certain)


def _quoted(file: str, step: Variable | Unknown) -> str:
    return f"{file}, line {step.line} ({printable(step.text, _WIDTH)})"


def _listed(names: Iterable[str]) -> str:
    all_names = list(dict.fromkeys(name.replace(":", ".") for name in names))
    shown = ", ".join(all_names[:_SHOWN])
    return shown if len(all_names) <= _SHOWN else f"{shown} and {len(all_names) - _SHOWN} more"


def _reason(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f"line {error.lineno}: {error.msg}"
    return str(error) or type(error).__name__


def _cold(why: str) -> Preload:
    return Preload(remarks=(f"nothing is preloaded: {why}",))


def _top(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def _read(path: str) -> bytes:
    # A pipe, such as `<(…)` in a shell, can be read only once, and the worker must read it.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(0, "not a file")
    with open(path, "rb") as file:
        return file.read()


def _why_not_lazily(text: bytes, known: AbstractSet[str]) -> str | None:
    """Return why the modules in :data:`LAZY` cannot be preloaded; ``None`` if they can be. When imported,
    they read environment variables. Reject them if the source mentions such a variable, which a function may
    set before the import. Those in ``known`` are harmless, because the preloading process sets them itself.
    """
    import re

    for word in _SETS_ANY:
        if word in text:
            return f"mentions {word.decode()}, which may set variables that it reads when it is imported"
    for found in re.findall(_READ_LAZILY, text):
        if found.decode() not in known:
            return f"mentions {found.decode()}, which it may read when it is imported"
    return None


_KEPT = "functions that are started by fork or forkserver already have the modules of their program"
_ISOLATED = "IES"
"""Options that make a Python interpreter ignore ``PYTHONPATH`` or not import ``site``."""


class Entry(Value):
    """Code that the workers run first. ``name`` is its name as the user wrote it. ``path`` may be unknown.
    Modules in ``folders`` are not preloaded; each worker imports them itself. ``interpreter`` is ``None`` for
    the interpreter of this process. ``why_cold`` is the reason why no module can be preloaded; ``None`` if
    modules can be. ``package`` is the package for relative imports.
    """

    name: str
    path: str | None = None
    folders: tuple[str, ...] = ()
    interpreter: str | None = None
    why_cold: str | None = None
    package: str = ""
    is_main: bool = True


def entry_of_command(command: Sequence[str]) -> Entry:
    """Find the Python code that a worker's command line runs first."""
    program, *arguments = command
    name = os.path.basename(program)
    if program not in (sys.executable, os.environ.get("PYTHON_EXEC")) and not name.startswith("python"):
        return Entry(name, why_cold=f"{name} is not a Python interpreter")
    interpreter = None if program == sys.executable else program
    # Reject an interpreter that is a script, which could remove `PYTHONPATH` before it starts Python.
    if is_script_file(program):
        return Entry(name, why_cold=f"{name} is a script, which may start Python in another way")
    found = parse_python(arguments)
    isolating = next((letter for letter in found.letters if letter in _ISOLATED), None)
    if isolating is not None:
        return Entry(name, why_cold=f"the interpreter is started with -{isolating}")
    if found.kind == "m":
        return _entry_of_module(found.program or "", interpreter)
    if found.kind == "script":
        return entry_of_script(found.program or "", interpreter)
    return Entry("-c" if found.kind == "c" else "-", None, (os.getcwd(),), interpreter)


def entry_of_function(function: Callable[..., Any], arguments: Sequence[Any], start_method: str) -> Entry:
    """Return the code that a worker loads first to call a function: its file, or the script that it runs."""
    name = getattr(function, "__qualname__", repr(function))
    of_module = getattr(function, "__module__", None) or ""
    if of_module == "elasticrs._engine.inside.run_path":
        return entry_of_script(str(arguments[0]), start_method=start_method)
    if start_method != "spawn":
        return Entry(name, why_cold=_KEPT)
    module = sys.modules.get(of_module)
    # With `python -m package.program`, the module is named `__main__`. Its spec contains its real name.
    spec = getattr(module, "__spec__", None)
    top = sys.modules.get((of_module if spec is None else spec.name).partition(".")[0])
    files = getattr(top, "__path__", None) or [getattr(top, "__file__", None)]
    folders = _own(os.path.dirname(file) for file in files if file)
    package = getattr(module, "__package__", None) or ""
    return Entry(name, getattr(module, "__file__", None), folders, package=package, is_main=False)


def entry_of_script(path: str, interpreter: str | None = None, *, start_method: str = "spawn") -> Entry:
    if start_method != "spawn":
        return Entry(path, why_cold=_KEPT)
    if os.path.isdir(path):
        return Entry(path, os.path.join(path, "__main__.py"), (path,), interpreter)
    if _is_archive(path):
        return Entry(path, None, (path,), interpreter)
    # Resolve symbolic links, because Python does so before it determines the script's folder.
    return Entry(path, path, (os.path.dirname(os.path.realpath(path)),), interpreter)


def _is_archive(path: str) -> bool:
    from zipimport import ZipImportError, zipimporter

    # A pipe can be read only once, and the worker must read it.
    if not os.path.isfile(path):
        return False
    try:
        zipimporter(path)
    except ZipImportError:
        return False
    return True


def _entry_of_module(name: str, interpreter: str | None) -> Entry:
    """Return the code that ``python -m`` runs for this module, without importing its parent packages. These
    could change where their modules are found.
    """
    here = os.getcwd()
    package, _, _ = name.rpartition(".")
    top, *rest = name.split(".")
    file, inner = _child([here, *sys.path], top)
    if file is None:
        spec = found_spec(top) if top else None
        if spec is not None and spec.has_location:
            file, inner = spec.origin, list(spec.submodule_search_locations or ())
    folders = (os.path.dirname(folder) for folder in inner) if inner else (os.path.dirname(file or here),)
    own = _own((here, *folders))
    for part in rest:
        file, inner = _child(inner, part)
    if inner:
        file, package = _child(inner, "__main__")[0], name
    return Entry(name, file, own, interpreter, package=package)


def own_sources(name: str, folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the source files that run when a module of the user is imported, each with its package."""
    package, place = "", folders
    for part in name.replace(":", ".").split("."):
        file, place = _child(place, part)
        inner = f"{package}.{part}" if package else part
        if file is not None:
            yield file, inner if place else package
        package = inner


def _child(folders: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    portions: list[str] = []
    for folder in folders:
        base = os.path.join(folder, name)
        init = os.path.join(base, "__init__.py")
        if os.path.isfile(init):
            return init, [base]
        if os.path.isfile(base + ".py"):
            return base + ".py", []
        if os.path.isdir(base):
            portions.append(base)
    return None, portions


def _own(folders: Iterator[str] | Sequence[str]) -> tuple[str, ...]:
    """Return the folders except those of the standard library and of installed packages."""
    library = os.path.dirname(os.__file__)
    return tuple(
        folder
        for folder in dict.fromkeys(folders)
        if folder != library and os.path.basename(folder) not in ("site-packages", "dist-packages")
    )


def found_spec(top: str) -> ModuleSpec | None:
    """Return the import spec of a top-level module without importing the module."""
    for finder in sys.meta_path:
        spec = finder.find_spec(top, None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None


def is_beside(top: str, folders: Sequence[str]) -> bool:
    """Return true if a name without dots refers to a module in one of these folders. A subfolder without
    ``__init__.py``, such as one with data, counts only if no other module has the name, as in Python.
    """
    spec = PathFinder.find_spec(top, list(folders))
    if spec is None or spec.has_location:
        return spec is not None
    elsewhere = found_spec(top)
    return elsewhere is None or elsewhere.loader is None
