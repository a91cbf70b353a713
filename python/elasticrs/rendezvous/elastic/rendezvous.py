"""How the agent of this node takes part in a rendezvous: which nodes it meets, and where."""

from __future__ import annotations

from elasticrs.job.value import Value, fresh
from elasticrs.rendezvous.endpoint import shown_endpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from dataclasses import KW_ONLY

    from elasticrs.rendezvous.elastic.etcd_site import EtcdSite
    from elasticrs.rendezvous.elastic.settings import Settings


class Rendezvous(Value):
    """Which nodes the agent of this node meets, and where.

    Args:
        backend: ``c10d`` (also for ``elasticrs``, its honest name), ``static`` or ``etcd``.
        host: of the endpoint, the first one of etcd: a name or an address, without brackets.
        port: of the endpoint; 0 for a free one, where this agent hosts the store.
        run_id: the name of the job.
        min_nodes: fewest nodes.
        max_nodes: most nodes.
        node_rank: rank of this node with ``static``; else ``None``.
        local_addr: address of this node, if the user has named one.
        settings: how they meet.
        etcd: where the nodes meet, and no agent hosts anything; ``None``: in a store of ours.
        config: the settings as the user has given them.
        member: how the names of this process's registrations begin; ``None``: any name.
        replaces: how those of another process began, of which nothing is left, as is known.
        clients: of the store, on each node.
        job: the name of the job in the store; ``None``: the run id.
        scope: prefix of the only keys that the token allows. ``None`` if it allows all keys.
    """

    backend: str
    host: str
    port: int
    _: KW_ONLY
    run_id: str
    min_nodes: int
    max_nodes: int
    settings: Settings
    node_rank: int | None = None
    local_addr: str | None = None
    etcd: EtcdSite | None = None
    config: Mapping[str, object] = fresh(factory=dict)
    member: str | None = None
    replaces: str | None = None
    clients: int = 1
    job: str | None = None
    scope: str | None = None

    @property
    def endpoint(self) -> str:
        """``HOST:PORT``, an IPv6 address in brackets; of etcd all of them, separated by commas."""
        return shown_endpoint(self.host, self.port) if self.etcd is None else self.etcd.shown

    @property
    def store(self) -> str:
        """What the nodes meet in, for the user."""
        return f"the rendezvous store {self.endpoint}" if self.etcd is None else f"etcd at {self.endpoint}"

    @property
    def max_connections(self) -> int:
        """How many connections the store accepts: agents may leave old ones behind, and tools have some."""
        return 2 * self.max_nodes * self.clients + 64

    @property
    def is_static(self) -> bool:
        """True if ranks, and the port of the workers' store, are given by hand."""
        return self.backend == "static"

    @property
    def master_port(self) -> int | None:
        """The port of the workers' store in every round: with ``static`` that of the endpoint, which is lent
        to the workers of rank 0; ``None``: a fresh one for each round.
        """
        return self.port if self.is_static else None

    @property
    def given_addr(self) -> str | None:
        """The name or address that was given for this node, without brackets; with ``static`` the endpoint's
        host for rank 0. ``None``: peers use this node's end of the connection to the store.
        """
        if self.is_static and self.node_rank == 0:
            return self.host
        return self.local_addr.strip("[]") if self.local_addr else None

    @property
    def store_lost_timeout(self) -> float:
        """Seconds to try to reach a lost store again."""
        given = self.settings
        # With ``static`` the workers of rank 0 have its port until they have stopped.
        return max(given.store_lost_timeout, given.settle) if self.is_static else given.store_lost_timeout


class ThisAgent(Value):
    """The agent of this node and its workers, as the rendezvous has to know them.

    Args:
        job: the name of the job in the store.
        agent: random name of this process, the same in all its registrations: ``[0-9a-f]+``.
        node: name of this node, for the user and for the order of ranks.
        host: what tells hosts apart; agents with the same share their loopback interface.
        role: of this node's workers.
        nproc: how many they are.
        max_restarts: of the job.
        hosts_store: this process serves the store, and so stays until the job is over.
        fallback_addr: an address or name that other hosts can reach, used when the connection to the store is
            a loopback one and the round spans hosts.
        keeps_workers: they stay when a round ends, and whoever asks for this tells the user of rounds.
    """

    job: str
    agent: str
    node: str
    host: str
    role: str
    nproc: int
    max_restarts: int
    hosts_store: bool
    fallback_addr: str | None
    keeps_workers: bool = False
