"""Classes for a rendezvous through etcd, with torchelastic's names. Programs with an ``etcd://`` URL do not
have to import this module.
"""

from __future__ import annotations

from elasticrs.rendezvous.etcd_rendezvous import EtcdRendezvous, EtcdRendezvousHandler
from elasticrs.rendezvous.etcd_store import EtcdStore

__all__ = ["EtcdRendezvous", "EtcdRendezvousHandler", "EtcdStore"]
