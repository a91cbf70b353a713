"""What goes into the rendezvous machine and what comes out of it.

:class:`Connected`, :class:`ConnectionLost`, :class:`Reply` and :class:`Changes` have the names and attributes
of the native client's events: the machine takes either, as it looks at a type's name and at attributes only.
"""

from __future__ import annotations

from elasticrs._value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Literal, TypeAlias

    from elasticrs.ranks import NodeRanks

    Cause: TypeAlias = Mapping[str, Any]
    OutcomeKind: TypeAlias = Literal[
        "succeeded",
        "failed",
        "closed",
        "aborted",
        "timeout",
        "left",
        "lost",
        "stuck",
        "refused",
        "spare",
    ]


class Entry(Value):
    """One key of the store.

    Args:
        key: its name.
        value: its value; ``None`` in a change that deleted it.
        create_revision: the revision at which it came into being.
        mod_revision: the revision of its latest put, or of its deletion.
    """

    __slots__ = ("create_revision", "key", "mod_revision", "value")

    def __init__(self, key: str, value: bytes | None, create_revision: int, mod_revision: int) -> None:
        self.key = key
        self.value = value
        self.create_revision = create_revision
        self.mod_revision = mod_revision


# --- events ---


class Event(Value):
    """Something that happened."""

    __slots__ = ()


class Begin(Event):
    """The loop is ready."""

    __slots__ = ()


class Connected(Event):
    """The connection that :class:`Connect` asked for is there.

    Args:
        revision: the store's at that time.
        local_address: our end of the connection.
    """

    __slots__ = ("local_address", "revision")

    def __init__(self, revision: int, local_address: str) -> None:
        self.revision = revision
        self.local_address = local_address


class ConnectionLost(Event):
    """There is no connection, or no longer; nothing of it is delivered after this event.

    Args:
        kind: ``refused``, ``unreachable``, ``timeout``, ``resolve``, ``version``, ``token``, ``not_ours``,
            ``run``, ``closed``, ``silent``, ``slow``, ``protocol`` or ``limit``.
        message: one line for the user.
    """

    __slots__ = ("kind", "message")

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        self.message = message


class Reply(Event):
    """The answer to :class:`Txn` or :class:`Watch`.

    Args:
        tag: of the request.
        ok: the compares held.
        revision: the store's after the request.
        results: one for each operation; for a watch with a snapshot, the entries.
    """

    __slots__ = ("ok", "results", "revision", "tag")

    def __init__(self, tag: int, ok: bool, revision: int, results: Sequence[Any] = ()) -> None:
        self.tag = tag
        self.ok = ok
        self.revision = revision
        self.results = results


class Changes(Event):
    """One revision of the store, as far as the watches of this connection cover it.

    Args:
        revision: which.
        changes: in the order of the transaction; ``value`` is ``None`` where a key was deleted.
    """

    __slots__ = ("changes", "revision")

    def __init__(self, revision: int, changes: Sequence[Entry]) -> None:
        self.revision = revision
        self.changes = changes


class GroupStarted(Event):
    """All workers of this node run."""

    __slots__ = ()


class StartFailed(Event):
    """The workers of this node could not be started, and nothing of them is left.

    Args:
        message: why, for the user.
        transient: the same start may succeed a moment later.
    """

    __slots__ = ("message", "transient")

    def __init__(self, message: str, transient: bool = False) -> None:
        self.message = message
        self.transient = transient


class WorkerFailed(Event):
    """A worker of this node has failed; others may still run.

    Args:
        cause: its description, for reports; ``time_ns`` is on the store's wall clock.
    """

    __slots__ = ("cause",)

    def __init__(self, cause: Cause) -> None:
        self.cause = cause


class WorkersDone(Event):
    """All workers of this node have exited with 0, and nothing of them is left.

    Args:
        summary: what to keep of it (JSON).
    """

    __slots__ = ("summary",)

    def __init__(self, summary: Mapping[str, Any] | None = None) -> None:
        self.summary = summary


class GroupEnded(Event):
    """Nothing of this node's workers is left, apart from what is stuck.

    Without an earlier :class:`Stop` or :class:`WorkerFailed` it counts as a failure.

    Args:
        cause: the first failure on this node, better known than in :class:`WorkerFailed`.
        stuck: what SIGKILL did not end, for the user.
    """

    __slots__ = ("cause", "stuck")

    def __init__(self, cause: Cause | None = None, stuck: str | None = None) -> None:
        self.cause = cause
        self.stuck = stuck


class TimerFired(Event):
    """The time of :class:`Arm` has passed.

    Args:
        name: of the timer.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Leave(Event):
    """Somebody asked this agent to stop.

    Args:
        reason: for the user.
        close: end the whole job; else only this node leaves it.
    """

    __slots__ = ("close", "reason")

    def __init__(self, reason: str, close: bool = False) -> None:
        self.reason = reason
        self.close = close


class StorePort(Event):
    """A fresh listener for a round's worker store is bound.

    Args:
        port: on which.
    """

    __slots__ = ("port",)

    def __init__(self, port: int) -> None:
        self.port = port


class StorePortFailed(Event):
    """No listener for the worker store could be bound: this node is of no use.

    Args:
        message: why, for the user.
    """

    __slots__ = ("message",)

    def __init__(self, message: str) -> None:
        self.message = message


# --- actions ---


class Action(Value):
    """Something that the loop has to do, in order."""

    __slots__ = ()


class Connect(Action):
    """Make a new connection; answered by :class:`Connected` or :class:`ConnectionLost`.

    Args:
        incarnation: of this agent's registration, counted from 1.
    """

    __slots__ = ("incarnation",)

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation


class Disconnect(Action):
    """Close the connection and drop what it still has to say."""

    __slots__ = ()


class Txn(Action):
    """A transaction, in the terms of the native client; answered by :class:`Reply` with the same tag."""

    __slots__ = ("compares", "otherwise", "tag", "then")

    def __init__(
        self,
        tag: int,
        compares: Sequence[tuple[Any, ...]],
        then: Sequence[tuple[Any, ...]],
        otherwise: Sequence[tuple[Any, ...]] = (),
    ) -> None:
        self.tag = tag
        self.compares = compares
        self.then = then
        self.otherwise = otherwise


class Watch(Action):
    """Watch keys; answered by :class:`Reply`, then :class:`Changes`."""

    __slots__ = ("exact", "prefix", "snapshot", "tag")

    def __init__(self, tag: int, prefix: str, exact: bool = False, snapshot: bool = True) -> None:
        self.tag = tag
        self.prefix = prefix
        self.exact = exact
        self.snapshot = snapshot


class Unwatch(Action):
    """End a watch."""

    __slots__ = ("exact", "prefix")

    def __init__(self, prefix: str, exact: bool = False) -> None:
        self.prefix = prefix
        self.exact = exact


class Start(Action):
    """Start the workers of a round.

    Args:
        round: its number, from 1 (``ELASTICRS_ROUND``).
        restarts: charged restarts of the job (``TORCHELASTIC_RESTART_COUNT``).
        group_rank: of this node.
        ranks: what its workers count from.
        master_addr: of group rank 0.
        master_port: of the round's worker store.
        serves_store: this node serves it: on the listener of the latest :class:`StorePort`, or, with a fixed
            port, on one that its workers bind (:class:`StartFailed` when it cannot be lent to them).
    """

    __slots__ = ("group_rank", "master_addr", "master_port", "ranks", "restarts", "round", "serves_store")

    def __init__(
        self,
        round: int,  # noqa: A002 -- the field's own word
        restarts: int,
        group_rank: int,
        ranks: NodeRanks,
        master_addr: str,
        master_port: int,
        serves_store: bool,
    ) -> None:
        self.round = round
        self.restarts = restarts
        self.group_rank = group_rank
        self.ranks = ranks
        self.master_addr = master_addr
        self.master_port = master_port
        self.serves_store = serves_store


class Stop(Action):
    """Stop the workers; answered by :class:`GroupEnded` (or by :class:`WorkersDone` when that came first).

    Args:
        round: whose workers.
        why: for the log.
        fenced: SIGKILL at once; else the usual signal and grace.
    """

    __slots__ = ("fenced", "round", "why")

    def __init__(self, round: int, why: str, fenced: bool = False) -> None:  # noqa: A002 -- the field's own word
        self.round = round
        self.why = why
        self.fenced = fenced


class BindStore(Action):
    """Bind a fresh listener for the worker store.

    Answered by :class:`StorePort` or :class:`StorePortFailed`.
    """

    __slots__ = ()


class CloseStore(Action):
    """Close this node's worker store or listener, if there is one."""

    __slots__ = ()


class Arm(Action):
    """Set a timer, or set it anew; :class:`TimerFired` follows once.

    Args:
        name: opaque.
        seconds: from now.
    """

    __slots__ = ("name", "seconds")

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self.seconds = seconds


class Disarm(Action):
    """Forget a timer; one that is not set is no error."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Announce(Action):
    """Tell the user one line."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class Outcome(Value):
    """How the job ended for this agent.

    Args:
        kind: ``succeeded``; ``failed`` (budget, losses, set-up: ``cause`` and ``message`` say why);
        ``closed``
            (joined too late); ``aborted`` (somebody closed the job); ``timeout`` (not enough nodes, or no
            store); ``left`` (asked to leave); ``lost`` (the store is gone); ``stuck`` (workers that SIGKILL
            does not end); ``refused`` (settings, token, version or run differ); ``spare`` (the job succeeded
            without this node).
        message: one line for the user.
        cause: the job's first failure.
    """

    __slots__ = ("cause", "kind", "message")

    def __init__(self, kind: OutcomeKind, message: str | None = None, cause: Cause | None = None) -> None:
        self.kind = kind
        self.message = message
        self.cause = cause


class Exit(Action):
    """The end; nothing follows.

    Args:
        outcome: how.
    """

    __slots__ = ("outcome",)

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


# --- what does not change ---


class Settings(Value):
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
        join_timeout: of one formation; an agent gives up alone after twice that.
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
