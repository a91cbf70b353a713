"""Rendezvous handlers by the name of their backend."""

from __future__ import annotations

import os
import warnings

from elasticrs.rendezvous.api import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from elasticrs.rendezvous.elastic.describe import BACKENDS, PYTHON, check_backend, describe
from elasticrs.rendezvous.static import OneNodeRendezvous

__all__ = ["get_rendezvous_handler"]


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler that the parameters name: ours, or one that a user registered.

    Args:
        params: what to make it from.

    Raises:
        ValueError: no such backend, or bad settings.
    """
    if not rendezvous_handler_registry.is_registered(params.backend):
        check_backend(params.backend, PYTHON)
    return rendezvous_handler_registry.create_handler(params)


def _create(params: RendezvousParameters) -> RendezvousHandler:
    rendezvous, notices = describe(
        params.backend,
        params.endpoint.strip(),
        params.run_id,
        (params.min_nodes, params.max_nodes),
        params.config,
        os.environ,
        local_addr=params.local_addr,
        words=PYTHON,
    )
    for notice in notices:
        warnings.warn(notice, RuntimeWarning, stacklevel=4)
    if rendezvous is None:
        return OneNodeRendezvous(params)
    from elasticrs.rendezvous.elastic.handler import ElasticRendezvousHandler

    return ElasticRendezvousHandler(rendezvous, params.backend)


for _backend in BACKENDS:
    rendezvous_handler_registry.register(_backend, _create)
