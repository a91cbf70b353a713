"""Rendezvous of a job's nodes: torch's interfaces, and the handlers that implement them."""

from __future__ import annotations

from elasticrs import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
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
    # Import the registry from the module that registers all handlers. Otherwise, callers could get a registry
    # without handlers.
    "elasticrs.rendezvous.registry": ("rendezvous_handler_registry", "_register_out_of_tree_handlers"),
    "elasticrs.rendezvous.api": tuple(__all__),
}
_SUBMODULES = (
    *("api", "c10d_rendezvous_backend", "dynamic_rendezvous", "etcd_rendezvous", "etcd_rendezvous_backend"),
    *("etcd_server", "etcd_store", "registry", "static_tcp_rendezvous", "utils"),
)


def __getattr__(name: str) -> object:
    # Import these names lazily, because the command line imports this package but needs none of them.
    return lazy(__name__, name, _HOMES, _SUBMODULES)
