"""Classes of torch's original etcd rendezvous. They run the elastic rendezvous, with etcd as its store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticrs import lazy
from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
from elasticrs._engine.nodes.transport.etcd_site import EtcdSite
from elasticrs._engine.nodes.transport.settings import Settings
from elasticrs.rendezvous.elastic_handler import ElasticRendezvousHandler

if TYPE_CHECKING:
    from elasticrs.rendezvous.api import RendezvousHandler, RendezvousParameters

__all__ = ["EtcdRendezvous", "EtcdRendezvousHandler", "create_rdzv_handler"]


def __getattr__(name: str) -> object:
    # Import torch's module for this class only when it is used, because that import loads all of torch.
    return lazy(__name__, name, {"torch.distributed.elastic.rendezvous.etcd_store": ("EtcdStore",)})


class EtcdRendezvous:
    """Description of a rendezvous over etcd, for :class:`EtcdRendezvousHandler`.

    Args:
        client: a client of python-etcd. Only its address and protocol are used.
        prefix: prefix of all keys in etcd.
        run_id: name of the job.
        num_min_workers: minimum number of nodes.
        num_max_workers: maximum number of nodes.
        timeout: seconds to wait for the minimum number of nodes.
        last_call_timeout: seconds to wait for further nodes after that.
    """

    def __init__(
        self,
        client: Any,
        prefix: str,
        run_id: str,
        num_min_workers: int,
        num_max_workers: int,
        timeout: float,
        last_call_timeout: float,
    ) -> None:
        host, port = client.host, client.port
        is_tls = getattr(client, "protocol", "http") == "https"
        site = EtcdSite(((host, port),), is_tls=is_tls, prefix=prefix.rstrip("/"))
        times = {"join_timeout": float(timeout), "last_call_timeout": float(last_call_timeout)}
        self.rendezvous = Rendezvous(
            "etcd",
            host,
            port,
            run_id=str(run_id),
            min_nodes=num_min_workers,
            max_nodes=num_max_workers,
            settings=Settings({**site.keep_alive, **times}),
            etcd=site,
        )


class EtcdRendezvousHandler(ElasticRendezvousHandler):
    """Handler that takes part in a rendezvous over etcd, for the node with address ``local_addr``."""

    def __init__(self, rdzv_impl: EtcdRendezvous, local_addr: str | None = None) -> None:
        super().__init__(rdzv_impl.rendezvous.replaced(local_addr=local_addr), "etcd")


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create a handler for the back end ``etcd``. Raise ``ValueError`` if a setting is invalid."""
    from elasticrs.rendezvous.registry import get_rendezvous_handler

    return get_rendezvous_handler(params)
