"""Torch's names for etcd as the back end of a rendezvous; not available in this version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticrs.rendezvous.not_in_this_version import Missing, missing

if TYPE_CHECKING:
    from elasticrs.rendezvous.api import RendezvousParameters

__all__ = ["EtcdRendezvousBackend", "create_backend"]


class EtcdRendezvousBackend(Missing):
    """Not available in this version."""


def create_backend(params: RendezvousParameters) -> tuple[EtcdRendezvousBackend, Any]:
    """Raise a ``ValueError``: it is not supported."""
    missing(f"the rendezvous backend {params.backend!r}")
