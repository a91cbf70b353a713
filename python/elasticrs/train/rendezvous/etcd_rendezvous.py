"""Torchelastic's classes for a rendezvous over etcd. An ``etcd://`` URL does not need this module."""

from __future__ import annotations

from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore

from elasticrs.rendezvous.etcd_rendezvous import EtcdRendezvous, EtcdRendezvousHandler

__all__ = ["EtcdRendezvous", "EtcdRendezvousHandler", "EtcdStore"]
