"""Rendezvous handlers by the name of their backend."""

from __future__ import annotations

from elasticrs.rendezvous.api import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from elasticrs.rendezvous.elastic.describe import BACKENDS, PYTHON, check_backend
from elasticrs.rendezvous.static import OneNodeRendezvous

__all__ = ["get_rendezvous_handler"]


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler that the parameters name: ours, or one that a user registered.

    Args:
        params: what to make it from.

    Raises:
        ValueError: no such backend, bad settings, or one of ours with more than one node.
    """
    if not rendezvous_handler_registry.is_registered(params.backend):
        check_backend(params.backend, PYTHON)
    return rendezvous_handler_registry.create_handler(params)


for _backend in BACKENDS:
    rendezvous_handler_registry.register(_backend, OneNodeRendezvous)
