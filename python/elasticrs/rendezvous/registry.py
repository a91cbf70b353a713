"""Rendezvous handlers by the name of their backend."""

from __future__ import annotations

from elasticrs.rendezvous.api import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from elasticrs.rendezvous.static import OneNodeRendezvous

__all__ = ["get_rendezvous_handler"]


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler that the parameters name: ``static``, ``c10d``, or one that a user registered.

    Args:
        params: what to make it from.

    Raises:
        ValueError: no such backend, or one of ours with more than one node.
    """
    return rendezvous_handler_registry.create_handler(params)


for _backend in ("static", "c10d"):
    rendezvous_handler_registry.register(_backend, OneNodeRendezvous)
