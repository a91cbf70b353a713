"""etcd as the place to meet, with torchelastic's names. A URL ``etcd://…`` needs no import of this."""

from __future__ import annotations

from elasticrs.rendezvous.etcd_rendezvous import EtcdRendezvous, EtcdRendezvousHandler
from elasticrs.rendezvous.etcd_store import EtcdStore

__all__ = ["EtcdRendezvous", "EtcdRendezvousHandler", "EtcdStore"]
