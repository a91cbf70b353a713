"""Classes for a rendezvous over etcd, named as in torchelastic. Programs that use an ``etcd://`` URL need not
import this module.
"""

from __future__ import annotations

from elasticrs.rendezvous.etcd_rendezvous import EtcdRendezvous, EtcdRendezvousHandler
from elasticrs.rendezvous.etcd_store import EtcdStore

__all__ = ["EtcdRendezvous", "EtcdRendezvousHandler", "EtcdStore"]
