"""Torch's names for its first rendezvous over etcd: here the elastic one, whose nodes meet in etcd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticrs.rendezvous.elastic.handler import ElasticRendezvousHandler
from elasticrs.rendezvous.elastic.rendezvous import Rendezvous
from elasticrs.rendezvous.elastic.settings import Settings
from elasticrs.rendezvous.etcd_client import EtcdClient

if TYPE_CHECKING:
    from elasticrs.rendezvous.api import RendezvousHandler, RendezvousParameters

__all__ = ["EtcdRendezvous", "EtcdRendezvousHandler", "create_rdzv_handler"]


class EtcdRendezvous:
    """With whom to meet in etcd; an argument of :class:`EtcdRendezvousHandler`.

    Args:
        client: ours, or python-etcd's, of which the address is taken.
        prefix: put before the names of keys.
        run_id: the name of the job.
        num_min_workers: fewest nodes.
        num_max_workers: most nodes.
        timeout: seconds to wait for the fewest.
        last_call_timeout: seconds to wait for more.
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
        site = EtcdClient.of(client).site.replaced(prefix=prefix.rstrip("/"))
        host, port = site.endpoints[0]
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
    """The elastic rendezvous, made from an :class:`EtcdRendezvous`.

    Args:
        rdzv_impl: with whom to meet.
        local_addr: address of this node.
    """

    def __init__(self, rdzv_impl: EtcdRendezvous, local_addr: str | None = None) -> None:
        super().__init__(rdzv_impl.rendezvous.replaced(local_addr=local_addr), "etcd")


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return the handler of the back end ``etcd``.

    Raises:
        ValueError: a bad setting.
    """
    from elasticrs.rendezvous.registry import get_rendezvous_handler

    return get_rendezvous_handler(params)
