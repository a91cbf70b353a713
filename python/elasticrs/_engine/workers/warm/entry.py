"""Find the file that workers run first, without importing or running user code."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

from elasticrs._engine.job.value import Value
from elasticrs._engine.workers.followers import is_script_file
from elasticrs._engine.workers.python_options import parse_python

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from typing import Any

_KEPT = "functions that are started by fork or forkserver already have the modules of their program"
_ISOLATED = "IES"
"""Options that make a Python interpreter ignore ``PYTHONPATH`` or not import ``site``."""


class Entry(Value):
    """Code that the workers run first.

    Args:
        name: name of the script, module or function, as the user wrote it.
        path: path of the file with the code; ``None`` if there is none or it was not found.
        folders: folders or zip archives with the user's own modules, which each worker imports itself.
        interpreter: Python interpreter of the workers; ``None`` for the interpreter of this process.
        why_cold: reason why nothing can be preloaded; ``None`` if modules can be preloaded.
        package: package of the file, for its relative imports; empty for a script.
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
    """Find the Python code that a worker's command line runs first.

    Args:
        command: program and arguments. If the program is a Python interpreter, its arguments determine the
            code.
    """
    program, *arguments = command
    name = os.path.basename(program)
    if program not in (sys.executable, os.environ.get("PYTHON_EXEC")) and not name.startswith("python"):
        return Entry(name, why_cold=f"{name} is not a Python interpreter")
    interpreter = None if program == sys.executable else program
    # Do not preload modules if the interpreter is a script. The script could remove `PYTHONPATH` before it
    # starts Python, and the nursery would then run the user's program instead of its own code.
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
    """Find the source file that workers load first in order to call a function.

    Args:
        function: function that the workers call. For :func:`elasticrs.run.run_script_path`, the result
            describes the script that it runs.
        arguments: arguments of the function.
        start_method: ``spawn``, ``fork`` or ``forkserver``.
    """
    name = getattr(function, "__qualname__", repr(function))
    of_module = getattr(function, "__module__", None) or ""
    if of_module == "elasticrs._engine.inside.run_path":
        return entry_of_script(str(arguments[0]), start_method=start_method)
    if start_method != "spawn":
        return Entry(name, why_cold=_KEPT)
    module = sys.modules.get(of_module)
    # With `python -m package.program`, the module is named `__main__`. Its spec contains the real name.
    spec = getattr(module, "__spec__", None)
    top = sys.modules.get((of_module if spec is None else spec.name).partition(".")[0])
    files = getattr(top, "__path__", None) or [getattr(top, "__file__", None)]
    folders = _own(os.path.dirname(file) for file in files if file)
    package = getattr(module, "__package__", None) or ""
    return Entry(name, getattr(module, "__file__", None), folders, package=package, is_main=False)


def entry_of_script(path: str, interpreter: str | None = None, *, start_method: str = "spawn") -> Entry:
    """Find the source file that workers load first in order to run a script.

    Args:
        path: path of the script, or of a folder or zip archive with a ``__main__.py``.
        interpreter: see :class:`Entry`.
        start_method: start method of the function that runs the script; ``spawn`` if no function does.
    """
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

    # Do not open a pipe, because a pipe can be read only once, and the worker must read it.
    if not os.path.isfile(path):
        return False
    try:
        zipimporter(path)
    except ZipImportError:
        return False
    return True


def _entry_of_module(name: str, interpreter: str | None) -> Entry:
    """Find the code that runs first in workers that are started with ``python -m``.

    This function does not import parent packages, so it does not support packages that change the location of
    their modules when they are imported.
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
    """Yield the source files that run when one of the user's own modules is imported, together with each
    file's package.

    Args:
        name: name of the module, in one of the forms that :mod:`.warm` describes.
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
    """Return the source file of a module in one of these folders, and the folders that contain its
    submodules.
    """
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
    """Return the folders that can contain the user's own modules, without duplicates. Leave out the standard
    library and folders of installed packages.
    """
    library = os.path.dirname(os.__file__)
    return tuple(
        folder
        for folder in dict.fromkeys(folders)
        if folder != library and os.path.basename(folder) not in ("site-packages", "dist-packages")
    )


def found_spec(top: str) -> ModuleSpec | None:
    """Return the import spec of a top-level module without importing the module.

    Args:
        top: name of the module.
    """
    for finder in sys.meta_path:
        spec = finder.find_spec(top, None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None


def is_beside(top: str, folders: Sequence[str]) -> bool:
    """Return true if a name without dots refers to a module of the user's own in one of these folders.

    A folder without ``__init__.py`` counts only if no other module has this name. Python prefers a regular
    module anywhere on its path, and folders such as ``datasets`` or ``wandb`` beside a script often contain
    no code.

    Args:
        top: name of the module.
        folders: see :class:`Entry`.
    """
    spec = PathFinder.find_spec(top, list(folders))
    if spec is None or spec.has_location:
        return spec is not None
    elsewhere = found_spec(top)
    return elsewhere is None or elsewhere.loader is None
