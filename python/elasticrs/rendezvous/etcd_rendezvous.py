"""Torch's names for the rendezvous over etcd's first interface; not available in this version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrs.rendezvous.not_in_this_version import Missing, missing

if TYPE_CHECKING:
    from elasticrs.rendezvous.api import RendezvousHandler, RendezvousParameters

__all__ = ["EtcdRendezvous", "EtcdRendezvousHandler", "create_rdzv_handler"]


class EtcdRendezvous(Missing):
    """Not available in this version."""


class EtcdRendezvousHandler(Missing):
    """Not available in this version."""


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Raise a ``ValueError``: it is not supported."""
    missing(f"the rendezvous backend {params.backend!r}")
