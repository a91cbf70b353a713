"""Redirects imports of ``torch.distributed.elastic``, ``.launcher``, ``.run`` and ``.launch``, and of
``torchelastic`` from 2019 and 2020, for code that cannot be edited, if ``ELASTICRS_ALIAS=1``.

Each module is a single object with two names, so classes compare equal, and patches are visible under both.
This module runs at the start of each interpreter, so it imports no module that is not already loaded.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

__all__ = ["activate", "is_active", "our_name"]

_TORCH = "torch.distributed"
_COMMANDS = (f"{_TORCH}.launcher", f"{_TORCH}.run", f"{_TORCH}.launch")
_ELASTIC = f"{_TORCH}.elastic"
_OF_2019 = "torchelastic"
# Modules of torchelastic that have a different name in elasticrs.
_MOVED = {
    f"{_OF_2019}.checkpoint.api": "elasticrs.train.checkpoint",
    f"{_OF_2019}.checkpoint.file_system_checkpoint": "elasticrs.train.checkpoint",
    f"{_OF_2019}.distributed.collectives": "elasticrs.train.distributed",
    f"{_OF_2019}.distributed.utils": "elasticrs.train.distributed",
    f"{_OF_2019}.event_logger.api": "elasticrs.train.event_logger",
    f"{_OF_2019}.metrics.api": "elasticrs.metrics.api",
    f"{_OF_2019}.p2p.coordinator_p2p": "elasticrs.train.p2p",
    f"{_OF_2019}.rendezvous.api": "elasticrs.train.rendezvous",
    f"{_OF_2019}.rendezvous.etcd_rendezvous": "elasticrs.rendezvous.etcd_rendezvous",
    f"{_OF_2019}.rendezvous.parameters": "elasticrs.train.rendezvous",
    f"{_OF_2019}.train_loop": "elasticrs.train.running",
    f"{_OF_2019}.version": "elasticrs",
    f"{_OF_2019}.worker_stats": "elasticrs.train.state",
}
_OURS = {
    # The first match wins, so the most specific names come first.
    **_MOVED,
    f"{_OF_2019}.agent": "elasticrs.agent",
    f"{_OF_2019}.distributed.launch": "elasticrs.launch",
    f"{_OF_2019}.events": "elasticrs.events",
    f"{_OF_2019}.multiprocessing": "elasticrs.multiprocessing",
    f"{_OF_2019}.rendezvous.etcd_server": "elasticrs.rendezvous.etcd_server",
    f"{_OF_2019}.timer": "elasticrs.timer",
    f"{_OF_2019}.utils": "elasticrs.utils",
    _OF_2019: "elasticrs.train",
    _ELASTIC: "elasticrs",
    **{name: "elasticrs" + name[len(_TORCH) :] for name in _COMMANDS},
}
_RENDEZVOUS = f"{_ELASTIC}.rendezvous."


def _is_kept(name: str) -> bool:
    """Return true for a module that is not redirected, because elasticrs itself uses torch's module."""
    if not name.startswith(_RENDEZVOUS):
        return False
    from elasticrs.rendezvous import TORCHS

    return name[len(_RENDEZVOUS) :] in TORCHS


def our_name(name: str) -> str | None:
    """Return the full name of elasticrs's module for a module of torch or torchelastic, or ``None``."""
    if _is_kept(name):
        return None
    for theirs, ours in _OURS.items():
        if name == theirs or name.startswith(theirs + "."):
            return ours + name[len(theirs) :]
    return None


def is_active() -> bool:
    """Return true if imports in this interpreter are redirected."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def activate() -> None:
    """Redirect later imports of torch's launcher to elasticrs. Raise ``RuntimeError`` if it is loaded."""
    if is_active():
        return
    if loaded := sorted(name for name in list(sys.modules) if our_name(name) is not None):
        raise RuntimeError(f"{loaded[0]} has already been imported; activate elasticrs.alias before that")
    # Python must ask this finder before the finder that finds torch's own files.
    sys.meta_path.insert(0, _Finder())


class _Finder:
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 -- the protocol's argument
        target: ModuleType | None = None,  # noqa: ARG002 -- the protocol's argument
    ) -> ModuleSpec | None:
        name = our_name(fullname)
        if name is None:
            return _torchs_own(fullname) if _is_kept(fullname) else None
        parent = name.rpartition(".")[0]
        if parent and parent not in sys.modules:
            # The parent package is torch's own, so let Python find this module there.
            return None
        from importlib.machinery import ModuleSpec
        from importlib.util import find_spec

        original = find_spec(name)
        if original is None:
            return None if fullname.startswith(_OF_2019) else _torchs_own(fullname)
        submodules = [each for each in _MOVED if each.rpartition(".")[0] == fullname]
        loader = _Loader(name, original, submodules)
        spec = ModuleSpec(fullname, loader, origin=original.origin)  # type: ignore[arg-type]
        spec.submodule_search_locations = original.submodule_search_locations
        if submodules and spec.submodule_search_locations is None:
            # importlib looks for submodules only in modules that have a `__path__`.
            spec.submodule_search_locations = []
        return spec


def _torchs_own(fullname: str) -> ModuleSpec | None:
    """Find a module that only torch has. Search torch's folders, because its package is now elasticrs's."""
    from importlib.machinery import PathFinder

    below = fullname.split(".")[2:-1]
    roots: Sequence[str] = sys.modules[_TORCH].__path__
    return PathFinder.find_spec(fullname, ["/".join((root, *below)) for root in roots])


class _Loader:
    """Makes an existing module available under a second name."""

    def __init__(self, name: str, spec: ModuleSpec, submodules: Sequence[str]) -> None:
        self._name = name
        self._spec = spec
        self._submodules = submodules

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002 -- the protocol's argument
        from importlib import import_module

        module = import_module(self._name)
        self._spec = module.__spec__ or self._spec
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Restore `__spec__`, which importlib has replaced with the spec of the alias.
        module.__spec__ = self._spec
        for name in self._submodules:
            # Programs use submodules as attributes without importing them.
            __import__(name)
        if _TORCH not in sys.modules:
            # `module` belongs to torchelastic, which does not need the imports below.
            return
        for name in (_ELASTIC, _COMMANDS[0]):
            # As in torch, these modules are attributes of `torch.distributed` without an import.
            if name not in sys.modules:
                __import__(name)

    def get_code(self, fullname: str) -> CodeType | None:
        from importlib.abc import InspectLoader
        from importlib.util import find_spec

        # Only torch's `launch` adds the local rank to the script's arguments.
        name = "elasticrs.alias.launch" if fullname == f"{_TORCH}.launch" else self._name
        spec = find_spec(name)
        loader = spec.loader if spec else None
        return loader.get_code(name) if isinstance(loader, InspectLoader) else None
