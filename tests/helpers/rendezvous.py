"""Descriptions of rendezvous for tests."""

from elasticrs._engine.nodes.protocol.rendezvous import Command, Rendezvous
from elasticrs._engine.nodes.transport.etcd_site import EtcdSite
from elasticrs._engine.nodes.transport.settings import Settings


def rendezvous(
    host: str,
    port: int = 29400,
    backend: str = "c10d",
    *,
    nodes: tuple[int, int] = (1, 4),
    etcd: EtcdSite | None = None,
    node_rank: int | None = None,
    local_addr: str | None = None,
    command: Command | None = None,
    **settings: object,
) -> Rendezvous:
    """Return the description of a rendezvous of the job ``job`` with these settings."""
    return Rendezvous(
        backend,
        host,
        port,
        run_id="job",
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        settings=Settings(settings),
        node_rank=node_rank,
        local_addr=local_addr,
        etcd=etcd,
        command=command,
    )
