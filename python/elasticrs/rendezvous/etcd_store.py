"""Torch's name for a store in etcd; not available in this version."""

from __future__ import annotations

from elasticrs.rendezvous.not_in_this_version import Missing

__all__ = ["EtcdStore"]


class EtcdStore(Missing):
    """Not available in this version."""
