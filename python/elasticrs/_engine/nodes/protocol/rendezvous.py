"""Value classes that describe a rendezvous and this node's agent."""

from __future__ import annotations

from elasticrs._engine.job.value import Value, fresh
from elasticrs._engine.nodes.transport.addresses import is_unspecified, shown_endpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from dataclasses import KW_ONLY

    from elasticrs._engine.job.restart_policy import RestartSettings
    from elasticrs._engine.nodes.protocol.commands import Command
    from elasticrs._engine.nodes.transport.etcd_site import EtcdSite
    from elasticrs._engine.nodes.transport.settings import Settings


class Rendezvous(Value):
    """Description of a rendezvous: its store, its nodes, and its settings on this node.

    Args:
        backend: ``c10d`` (also for its alias ``elasticrs``), ``static`` or ``etcd``.
        host: host of the endpoint, or of the first endpoint of etcd. A name or an address without brackets.
        port: port of the endpoint; 0 for any free port if this agent hosts the store.
        run_id: name of the job, as given by the user.
        min_nodes: minimum number of nodes.
        max_nodes: maximum number of nodes.
        node_rank: rank of this node with ``static``; otherwise ``None``.
        local_addr: address of this node; ``None`` if the user has not set it.
        settings: settings of the rendezvous.
        etcd: addresses and settings of etcd, if it is the store; ``None`` for elasticrs's own store.
        config: settings as the user has given them.
        member: prefix of the names of this process's registrations; a random name if ``None``.
        replaces: prefix of the registrations of a process that this process replaces and that is known to be
            dead; ``None`` if there is none.
        clients: number of store clients on each node.
        job: name of the job in the store; the run id if ``None``.
        scope: prefix of the keys that the token gives access to; ``None`` if it gives access to all keys.
        command: command of the workers, which has to be the same on all nodes; ``None`` if it is unknown.
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
    command: Command | None = None

    @property
    def needs_no_other_node(self) -> bool:
        """True if the agent can run the job without other nodes: the job has one node, its command is known,
        and its store is not etcd.
        """
        return self.max_nodes == 1 and self.command is not None and self.etcd is None

    @property
    def endpoint(self) -> str:
        """Endpoint as ``HOST:PORT``, with an IPv6 address in brackets. For etcd, all endpoints,
        comma-separated.
        """
        return shown_endpoint(self.host, self.port) if self.etcd is None else self.etcd.shown

    @property
    def store(self) -> str:
        """Description of the store, for the user."""
        return f"the rendezvous store {self.endpoint}" if self.etcd is None else f"etcd at {self.endpoint}"

    @property
    def max_connections(self) -> int:
        """Maximum number of connections that the store accepts. It exceeds the number of clients, because
        stale connections of agents may still be open and tools may connect too.
        """
        return 2 * self.max_nodes * self.clients + 64

    @property
    def is_static(self) -> bool:
        """True if the user assigns the node ranks and the port of the workers' store."""
        return self.backend == "static"

    @property
    def master_port(self) -> int | None:
        """Fixed port of the workers' store; ``None`` if the port changes every round. Only the back end
        ``static`` has a fixed port: the port of the endpoint.
        """
        return self.port if self.is_static else None

    @property
    def given_addr(self) -> str | None:
        """Name or address that the user gave for this node, without brackets. With ``static``, it is the
        endpoint's host if this node has rank 0.

        ``None`` if the user gave none. Other nodes then use the local address of this node's connection to
        the store.
        """
        if self.is_static and self.node_rank == 0 and not is_unspecified(self.host):
            return self.host
        return self.local_addr.strip("[]") if self.local_addr else None

    @property
    def store_lost_timeout(self) -> float:
        """Seconds for which this agent tries to reconnect after losing its connection to the store."""
        given = self.settings
        # With ``static``, keep trying for at least ``settle`` seconds, because workers that are still
        # stopping may occupy the store's port until then.
        return max(given.store_lost_timeout, given.settle) if self.is_static else given.store_lost_timeout


class ThisAgent(Value):
    """Description of this node's agent and its workers, as input to the rendezvous.

    Args:
        job: name of the job in the store.
        agent: name of this process, the same in all its registrations. The name is random, unless the
            rendezvous gives a prefix for it.
        node: name of this node, for the user and for the order of ranks.
        host: identifier of the host. Agents with the same identifier share their loopback interface.
        role: role of this node's workers.
        nproc: number of this node's workers.
        policy: settings of the restart policy, with the maximum number of restarts of the job.
        fatal_exit_codes: exit codes of workers that end the job, as the user has written them.
        hosts_store: true if this process serves the store, so that it must stay until the job is over.
        fallback_addr: address or name under which other hosts reach this node. It is used if the connection
            to the store has a loopback address and the round has several hosts. ``None`` if there is none.
        keeps_workers: true if the workers keep running when a round ends. The caller of the state machine
            then reports rounds to the user.
        health_timeout: maximum number of seconds that this node needs, after its workers have stopped, for
            the node check and for the wait until device memory is free. 0 if it does neither.
        why_hosts: reason why this process serves the store; ``None`` if it does not.
        launch: identifier of the session or Slurm step in which the user started this agent. Only the
            identifiers of agents on the same host are compared.
    """

    job: str
    agent: str
    node: str
    host: str
    role: str
    nproc: int
    policy: RestartSettings
    hosts_store: bool
    fallback_addr: str | None
    keeps_workers: bool = False
    fatal_exit_codes: str = ""
    health_timeout: float = 0.0
    why_hosts: str | None = None
    launch: str = ""
