"""The file that workers begin with, found without importing or running anything of the user's."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

from elasticrs.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from typing import Any

_LONG_WITH_VALUE = "--check-hash-based-pycs"
_KEPT = "functions that are started by fork or forkserver have what their program imported"
_ISOLATED = "IES"
"""Options with which an interpreter does not take ``PYTHONPATH`` or ``site`` into account."""


class Entry(Value):
    """What the workers run.

    Args:
        name: of the script, module or function, as the user wrote it.
        path: the file with its code; ``None`` if there is none, or it was not found.
        folders: the modules in these are the user's own, and each worker reads them anew.
        interpreter: of the workers; ``None`` for this one.
        why_cold: why nothing can be preloaded at all.
        package: of the file, for its relative imports; empty for a script.
        is_main: true if the file runs with ``"__main__"`` as its ``__name__``.
    """

    name: str
    path: str | None = None
    folders: tuple[str, ...] = ()
    interpreter: str | None = None
    why_cold: str | None = None
    package: str = ""
    is_main: bool = True


def entry_of_command(command: Sequence[str]) -> Entry:
    """The entry of workers that are programs.

    Args:
        command: program and arguments; if the program is a Python, then as its command line.
    """
    program, *arguments = command
    name = os.path.basename(program)
    if program not in (sys.executable, os.environ.get("PYTHON_EXEC")) and not name.startswith("python"):
        return Entry(name, why_cold=f"{name} is not a Python interpreter")
    interpreter = None if program == sys.executable else program
    if interpreter is not None and _is_script(interpreter):
        return Entry(name, why_cold=f"{name} is a script, which may start Python in another way")
    kind, what = _what_runs(arguments)
    if kind and kind in _ISOLATED:
        return Entry(name, why_cold=f"the interpreter is started with -{kind}")
    if kind == "m":
        return _entry_of_module(what, interpreter)
    if kind == "script":
        return entry_of_script(what, interpreter)
    return Entry(f"-{kind}", None, (os.getcwd(),), interpreter)


def _is_script(program: str) -> bool:
    """True for what may drop ``PYTHONPATH`` before it starts Python: the script would run in the nursery."""
    import shutil

    try:
        with open(shutil.which(program) or program, "rb") as file:
            return file.read(4) != b"\x7fELF"
    except OSError:
        return False  # It cannot be started, either.


def entry_of_function(function: Callable[..., Any], arguments: Sequence[Any], start_method: str) -> Entry:
    """The entry of workers that are functions.

    Args:
        function: what they call; for :func:`elasticrs.run.run_script_path` its script counts.
        arguments: for it.
        start_method: ``spawn``, ``fork`` or ``forkserver``.
    """
    name = getattr(function, "__qualname__", repr(function))
    of_module = getattr(function, "__module__", None) or ""
    if of_module == "elasticrs._worker.run_path":
        return entry_of_script(str(arguments[0]), start_method=start_method)
    if start_method != "spawn":
        return Entry(name, why_cold=_KEPT)
    module = sys.modules.get(of_module)
    # `python -m package.program` is `__main__`, too.
    spec = getattr(module, "__spec__", None)
    top = sys.modules.get((of_module if spec is None else spec.name).partition(".")[0])
    files = getattr(top, "__path__", None) or [getattr(top, "__file__", None)]
    folders = _own(os.path.dirname(file) for file in files if file)
    package = getattr(module, "__package__", None) or ""
    return Entry(name, getattr(module, "__file__", None), folders, package=package, is_main=False)


def entry_of_script(path: str, interpreter: str | None = None, *, start_method: str = "spawn") -> Entry:
    """The entry of workers that are a script.

    Args:
        path: of the script, or of a folder with ``__main__.py``.
        interpreter: see :class:`Entry`.
        start_method: of the function that runs it, if one does.
    """
    if start_method != "spawn":
        return Entry(path, why_cold=_KEPT)
    if os.path.isdir(path):
        return Entry(path, os.path.join(path, "__main__.py"), (path,), interpreter)
    # Python follows a link before it takes the folder.
    return Entry(path, path, (os.path.dirname(os.path.realpath(path)),), interpreter)


def _what_runs(arguments: Sequence[str]) -> tuple[str, str]:
    """What an interpreter runs by its command line.

    Returns:
        ``"script"`` and its path, ``"m"`` and the module, ``"c"`` and the code; ``""`` for the standard
        input; or the letter of an option of :data:`_ISOLATED`.
    """
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return "script", next(rest, "")
        if argument == "-":
            break
        if not argument.startswith("-"):
            return "script", argument
        if argument == _LONG_WITH_VALUE:
            next(rest, None)
        if argument.startswith("--"):
            continue
        for index, letter in enumerate(argument[1:], 2):
            if letter in _ISOLATED:
                return letter, ""
            if letter in "cmWX":
                value = argument[index:] or next(rest, "")
                if letter in "cm":
                    return letter, value
                break
    return "", ""


def _entry_of_module(name: str, interpreter: str | None) -> Entry:
    """The entry of ``python -m``.

    Parents are not imported: a package that changes where its modules are found is beyond this.
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
    """The sources that run when one of the user's own modules is imported, each with its package.

    Args:
        name: of the module, in one of the forms of :mod:`elasticrs.workers.warm`.
        folders: see :class:`Entry`.
    """
    package, place = "", folders
    for part in name.replace(":", ".").split("."):
        file, place = _child(place, part)
        inner = f"{package}.{part}" if package else part
        if file is not None:
            yield file, inner if place else package
        package = inner


def _child(folders: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The source of a module in one of these folders, and the folders of its own modules."""
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
    """These folders, each once, without the interpreter's library and those of installed packages."""
    library = os.path.dirname(os.__file__)
    return tuple(
        folder
        for folder in dict.fromkeys(folders)
        if folder != library and os.path.basename(folder) not in ("site-packages", "dist-packages")
    )


def found_spec(top: str) -> ModuleSpec | None:
    """What this interpreter would import by a name without dots; nothing is imported.

    Args:
        top: the name.
    """
    for finder in sys.meta_path:
        spec = finder.find_spec(top, None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None


def is_beside(top: str, folders: Sequence[str]) -> bool:
    """Return true if a name without dots is the user's own module in one of these folders.

    A folder without ``__init__.py`` counts only if nothing else has the name: Python prefers a module
    anywhere on its path, and ``datasets`` or ``wandb`` beside a script often holds no code at all.

    Args:
        top: the name.
        folders: see :class:`Entry`.
    """
    spec = PathFinder.find_spec(top, list(folders))
    if spec is None or spec.has_location:
        return spec is not None
    elsewhere = found_spec(top)
    return elsewhere is None or elsewhere.loader is None
