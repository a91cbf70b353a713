"""Torch's name for a server of etcd; not available in this version."""

from __future__ import annotations

from elasticrs.rendezvous.not_in_this_version import Missing

__all__ = ["EtcdServer"]


class EtcdServer(Missing):
    """Not available in this version."""
