"""Redirects imports of ``torch.distributed.elastic`` to elasticrs, for code that cannot be edited.

The redirection needs ``ELASTICRS_ALIAS=1`` and the hook that ``python -m elasticrs.alias install`` installs.
In every interpreter with this variable, including spawned workers, these names then refer to the modules of
elasticrs: ``torch.distributed.elastic`` and ``torch.distributed.launcher`` with all their submodules,
``torch.distributed.run`` and ``torch.distributed.launch``. Each module is a single object with two names, so
classes compare equal, and a patch under one name is visible under the other name.

The package ``torchelastic`` from 2019 and 2020 is redirected to :mod:`elasticrs.train` in the same way. Its
modules for launching, agents, events, multiprocessing, timers and utilities later became part of torch. They
are redirected to the elasticrs modules that replace these parts of torch.

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
# Modules of torchelastic that have a different name in elasticrs, mapped to that name.
_MOVED = {
    f"{_OF_2019}.checkpoint.file_system_checkpoint": "elasticrs.train.checkpoint.files",
    f"{_OF_2019}.distributed.collectives": "elasticrs.train.distributed",
    f"{_OF_2019}.distributed.utils": "elasticrs.train.distributed",
    f"{_OF_2019}.event_logger.api": "elasticrs.train.event_logger",
    f"{_OF_2019}.metrics.api": "elasticrs.metrics.api",
    f"{_OF_2019}.p2p.coordinator_p2p": "elasticrs.train.p2p",
    f"{_OF_2019}.rendezvous.api": "elasticrs.train.rendezvous",
    f"{_OF_2019}.rendezvous.parameters": "elasticrs.train.rendezvous",
    f"{_OF_2019}.train_loop": "elasticrs.train.running",
    f"{_OF_2019}.version": "elasticrs",
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
    """Return true for modules of torch that are not redirected, because the modules of elasticrs with these
    names are torch's own.
    """
    if not name.startswith(_RENDEZVOUS):
        return False
    from elasticrs.rendezvous import TORCHS

    return name[len(_RENDEZVOUS) :] in TORCHS


def our_name(name: str) -> str | None:
    """Return the full name of the elasticrs module that replaces a torch or torchelastic module; ``None`` if
    elasticrs does not replace it.
    """
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
    """Redirect all later imports in this interpreter. Idempotent.

    Raises:
        RuntimeError: torch's own modules are already loaded and would stay in use beside the elasticrs
            modules.
    """
    if is_active():
        return
    if loaded := sorted(name for name in sys.modules if our_name(name) is not None):
        raise RuntimeError(f"{loaded[0]} has already been imported; activate elasticrs.alias before that")
    # Insert this finder at the front, so that Python tries it before the finder of torch's own files.
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
            # Elasticrs has not replaced the parent package, so let Python find the module in torch's own
            # package.
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
            # Set a search path, because importlib looks for submodules only in modules that have a
            # `__path__`.
            spec.submodule_search_locations = []
        return spec


def _torchs_own(fullname: str) -> ModuleSpec | None:
    """Find a module that exists only in torch. Search torch's folders explicitly, because the parent package
    belongs to elasticrs and its search path does not contain the module.
    """
    from importlib.machinery import PathFinder

    below = fullname.split(".")[2:-1]
    roots: Sequence[str] = sys.modules[_TORCH].__path__
    return PathFinder.find_spec(fullname, ["/".join((root, *below)) for root in roots])


class _Loader:
    """Import loader that makes an existing module available under a second name, and does not change it."""

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
        # The module has already run. Restore its `__spec__`, because importlib has replaced it with the spec
        # of the alias.
        module.__spec__ = self._spec
        for name in self._submodules:
            # Import the submodules now, because programs use them as attributes without importing them.
            __import__(name)
        if _TORCH not in sys.modules:
            # `module` belongs to torchelastic, because `torch.distributed` has not been imported. Skip the
            # imports below, because only modules of torch need them.
            return
        for name in (_ELASTIC, _COMMANDS[0]):
            # Import these modules now, as torch's own modules do, because programs use them as attributes of
            # `torch.distributed` without importing them.
            if name not in sys.modules:
                __import__(name)

    def get_code(self, fullname: str) -> CodeType | None:
        from importlib.abc import InspectLoader
        from importlib.util import find_spec

        # Use a separate module for `torch.distributed.launch`, because only this launcher adds the local rank
        # to the script's arguments.
        name = "elasticrs.alias.launch" if fullname == f"{_TORCH}.launch" else self._name
        spec = find_spec(name)
        loader = spec.loader if spec else None
        return loader.get_code(name) if isinstance(loader, InspectLoader) else None
