"""What one agent's part in a rendezvous begins with: the user's settings, the job, and this node."""

from __future__ import annotations

from elasticrs._value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class MemberSettings(Value):
    """What an agent was started with. Times are seconds.

    Args:
        run_id: of the job.
        agent: random name of this process, the same in all its incarnations: ``[0-9a-f]+``.
        node: name of this node, for the user and for the order of ranks.
        host: what tells hosts apart; agents with the same share their loopback interface.
        endpoint: ``host:port`` of the store, for messages.
        min_nodes, max_nodes: how many take part in a round.
        max_restarts: of the job.
        role, nproc: of this node's workers.
        order_hint: sorts before the name; ``None`` sorts last.
        local_addr: the address that the user wants peers to use for this node.
        fallback_addr: an address or name that other hosts can reach, used when the connection to the store is
            a loopback one and the round spans hosts.
        master_port: fixed port of the worker store, which is the port of this store as well and is lent to
            the workers of rank 0; ``None``: a fresh one for every round.
        node_rank: the group rank of this node, given by hand; ``None``: the rendezvous gives it.
        rank_timeout: how long another node may have this node's rank before that is a mistake: longer than
            the time-to-live of a lease.
        backend: what keeps the state; has to be the same everywhere.
        hosts_store: this process serves the store, and so stays until the job is over.
        homogeneous: all nodes must have the same role and nproc.
        fresh: forget an earlier job of the same run id if none of its nodes is left.
        scale_up: end a round when a waiting node could take part.
        join_timeout: of one formation with too few nodes.
        last_call_timeout: of the first round, once min_nodes are there.
        restart_call_timeout: how long a restart waits for replacements when the job would shrink.
        settle: how long to wait for members that stop slowly; must exceed the time-to-live of a lease and the
            longest grace.
        scale_up_delay: from the first waiting node to the end of the round.
        close_timeout: how long an agent that leaves waits for the store's answer.
        exit_barrier_timeout: how long a finished node waits for the others.
        store_lost_timeout: how long to try to reach a lost store again.
        short_round: a lost round shorter than this counts as short.
        max_short_losses: that many short lost rounds in a row close the job.
        max_node_losses: more lost nodes than this close the job; ``None``: no limit.
    """

    __slots__ = (
        "agent",
        "backend",
        "close_timeout",
        "endpoint",
        "exit_barrier_timeout",
        "fallback_addr",
        "fresh",
        "homogeneous",
        "host",
        "hosts_store",
        "join_timeout",
        "last_call_timeout",
        "local_addr",
        "master_port",
        "max_node_losses",
        "max_nodes",
        "max_restarts",
        "max_short_losses",
        "min_nodes",
        "node",
        "node_rank",
        "nproc",
        "order_hint",
        "rank_timeout",
        "restart_call_timeout",
        "role",
        "run_id",
        "scale_up",
        "scale_up_delay",
        "settle",
        "short_round",
        "store_lost_timeout",
    )

    def __init__(
        self,
        run_id: str,
        agent: str,
        node: str,
        *,
        host: str = "",
        endpoint: str = "",
        min_nodes: int = 1,
        max_nodes: int = 1,
        max_restarts: int = 0,
        role: str = "default",
        nproc: int = 1,
        order_hint: int | None = None,
        local_addr: str | None = None,
        fallback_addr: str | None = None,
        master_port: int | None = None,
        node_rank: int | None = None,
        rank_timeout: float = 6.0,
        backend: str = "c10d",
        hosts_store: bool = False,
        homogeneous: bool = False,
        fresh: bool = False,
        scale_up: bool = True,
        join_timeout: float = 600.0,
        last_call_timeout: float = 30.0,
        restart_call_timeout: float = 0.0,
        settle: float = 40.0,
        scale_up_delay: float = 1.0,
        close_timeout: float = 30.0,
        exit_barrier_timeout: float = 300.0,
        store_lost_timeout: float = 10.0,
        short_round: float = 60.0,
        max_short_losses: int = 10,
        max_node_losses: int | None = None,
    ) -> None:
        self.run_id = run_id
        self.agent = agent
        self.node = node
        self.host = host or node
        self.endpoint = endpoint
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.max_restarts = max_restarts
        self.role = role
        self.nproc = nproc
        self.order_hint = order_hint
        self.local_addr = local_addr
        self.fallback_addr = fallback_addr
        self.master_port = master_port
        self.node_rank = node_rank
        self.rank_timeout = rank_timeout
        self.backend = backend
        self.hosts_store = hosts_store
        self.homogeneous = homogeneous
        self.fresh = fresh
        self.scale_up = scale_up
        self.join_timeout = join_timeout
        self.last_call_timeout = last_call_timeout
        self.restart_call_timeout = restart_call_timeout
        self.settle = settle
        self.scale_up_delay = scale_up_delay
        self.close_timeout = close_timeout
        self.exit_barrier_timeout = exit_barrier_timeout
        self.store_lost_timeout = store_lost_timeout
        self.short_round = short_round
        self.max_short_losses = max_short_losses
        self.max_node_losses = max_node_losses

    @property
    def patience(self) -> float:
        """After how long without a round an agent gives up alone.

        A leader may begin to wait as late as ``join_timeout`` after this agent, and then waits for both: for
        enough nodes, and after that for more of them.
        """
        return 2 * self.join_timeout + max(self.last_call_timeout, self.restart_call_timeout)

    def replaced(self, **changes: object) -> MemberSettings:
        """Return a copy with some settings replaced."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return MemberSettings(**(fields | changes))
