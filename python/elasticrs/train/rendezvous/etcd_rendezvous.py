"""Classes for a rendezvous over etcd, named as in torchelastic. Programs that use an ``etcd://`` URL need not
import this module.
"""

from __future__ import annotations

from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore

from elasticrs.rendezvous.etcd_rendezvous import EtcdRendezvous, EtcdRendezvousHandler

__all__ = ["EtcdRendezvous", "EtcdRendezvousHandler", "EtcdStore"]
