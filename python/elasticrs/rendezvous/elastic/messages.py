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


class StoreHosted(Event):
    """The process has begun to serve the coordination store, which it did not at first.

    Args:
        fallback_addr: as in the settings of the member, now that it is known.
    """

    __slots__ = ("fallback_addr",)

    def __init__(self, fallback_addr: str | None = None) -> None:
        self.fallback_addr = fallback_addr


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
        hung: the reason is this worker of another node, which hangs: what it waits for may be here.
    """

    __slots__ = ("fenced", "hung", "round", "why")

    def __init__(
        self,
        round: int,  # noqa: A002 -- the field's own word
        why: str,
        fenced: bool = False,
        hung: Cause | None = None,
    ) -> None:
        self.round = round
        self.why = why
        self.fenced = fenced
        self.hung = hung


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
