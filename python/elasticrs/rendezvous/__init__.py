"""How the nodes of a job find each other: torch's interfaces, and handlers for them."""

from __future__ import annotations

from elasticrs import lazy_submodule

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

_SUBMODULES = (
    "api",
    "c10d_rendezvous_backend",
    "dynamic_rendezvous",
    "etcd_rendezvous",
    "etcd_rendezvous_backend",
    "etcd_server",
    "etcd_store",
    "registry",
    "static_tcp_rendezvous",
    "utils",
)


def __getattr__(name: str) -> object:
    # The command line comes through this package and needs none of these.
    if name in __all__:
        from elasticrs.rendezvous import api

        if name == "rendezvous_handler_registry":
            # Whoever asks it expects to find the handlers in it.
            from elasticrs.rendezvous import registry

        return getattr(api, name)
    if name == "_register_out_of_tree_handlers":
        from elasticrs.rendezvous import registry

        return registry._register_out_of_tree_handlers
    return lazy_submodule(__name__, name, _SUBMODULES)
