"""Rendezvous of a job's nodes: torch's interfaces, and the handlers that implement them."""

from __future__ import annotations

import sys

from elasticrs import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from elasticrs.rendezvous.api import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousGracefulExitError,
        RendezvousHandler,
        RendezvousHandlerCreator,
        RendezvousHandlerRegistry,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStateError,
        RendezvousStoreInfo,
        RendezvousTimeoutError,
        rendezvous_handler_registry,
    )

__all__ = [
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "rendezvous_handler_registry",
]

_HOMES = {
    # Importing this module registers the handlers of all back ends. Without it, the registry would be empty.
    "elasticrs.rendezvous.registry": ("rendezvous_handler_registry", "_register_out_of_tree_handlers"),
    "elasticrs.rendezvous.api": tuple(__all__),
}
TORCHS = (
    *("_etcd_stub", "c10d_rendezvous_backend", "dynamic_rendezvous", "etcd_rendezvous_backend"),
    *("etcd_server", "etcd_store", "utils"),
)
"""Names under which programs import torch's own modules from this package. elasticrs does not use them."""

_SUBMODULES = ("api", "etcd_rendezvous", "registry", "static_tcp_rendezvous", *TORCHS)


class _TorchsModules:
    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG003 -- the import system passes all
        package, _, name = fullname.rpartition(".")
        if package != __name__ or name not in TORCHS:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(fullname, cls)  # type: ignore[arg-type]  # a class can be a loader, too

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:  # noqa: ARG004 -- the import system creates an empty module
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        from importlib import import_module

        name = module.__name__
        sys.modules[name] = import_module(f"torch.distributed.elastic.{name.partition('.')[2]}")


sys.meta_path.append(_TorchsModules)


def __getattr__(name: str) -> object:
    # Import lazily, because the command line imports this package but needs none of these names.
    return lazy(__name__, name, _HOMES, _SUBMODULES)
