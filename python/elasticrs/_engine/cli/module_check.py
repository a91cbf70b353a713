"""Check that the module given with ``-m`` exists, without importing it and before any worker is started."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec


def why_no_module(name: str) -> str | None:
    """Return the reason why ``python -m NAME`` cannot run; ``None`` if it can run, or if that is unknown.

    Args:
        name: name of the module.
    """
    try:
        return _why_not(name)
    except Exception:
        # The check itself failed, for example because an import hook raised an exception. The module may
        # still be importable. If not, Python reports the error in the worker.
        return None


def _why_not(name: str) -> str | None:
    # With `-m`, Python puts the working directory first on `sys.path`.
    places: Sequence[str] | None = ["", *sys.path]
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        part = ".".join(parts[:depth])
        found = _find(part, places)
        if found is None:
            return f"there is no module {part!r}{_hint(name)}"
        places = found.submodule_search_locations
        if depth == len(parts):
            break
        if places is None:
            # Do not reject names such as `os.path`, because a module that is not a package may register
            # submodules when it is imported.
            return f"{part!r} is a file, not a package{_hint(name)}" if name.endswith(".py") else None
        if _changes_its_path(found):
            return None
    if places is not None and _find(f"{name}.__main__", places) is None:
        return f"{name!r} is a package without a __main__ module"
    return None


def _changes_its_path(package: ModuleSpec) -> bool:
    """Return true if a package may change its ``__path__`` when it is imported."""
    if not package.has_location or package.origin is None:
        return False
    with open(package.origin, "rb") as file:
        return b"__path__" in file.read()


def _find(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        # For a top-level module, pass `path` only to `PathFinder`, because the other finders expect `None`
        # instead.
        is_of_files = getattr(finder, "__name__", "") == "PathFinder"
        path = places if is_of_files or "." in name else None
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def _hint(name: str) -> str:
    if name.endswith(".py") and os.path.isfile(name):
        return f"; to run the file {name}, leave out -m"
    return "; is it installed in this environment, or is another directory meant?"
