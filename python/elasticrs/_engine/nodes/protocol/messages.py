"""Events and actions of the rendezvous state machine, except those of the store.

The store's requests, which are also actions, and the store's events are in
:mod:`.coordination`.
"""

from __future__ import annotations

from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Literal, TypeAlias

    from elasticrs._engine.job.ranks import NodeRanks
    from elasticrs._engine.nodes.transport.coordination import Request, StoreEvent

    Cause: TypeAlias = Mapping[str, Any]
    # fmt: off
    OutcomeKind: TypeAlias = Literal[
        "succeeded", "failed", "closed", "aborted", "timeout", "left", "lost", "stuck", "refused", "spare",
        "excluded"
    ]
    # fmt: on

# --- events ---


class Begin(Value):
    """Event: the agent is ready to join the rendezvous."""


class StartFailed(Value):
    """Event: this node's workers could not be started, and all their processes have exited.

    Args:
        message: reason for the failure.
        transient: true if another attempt may succeed a moment later.
    """

    message: str
    transient: bool = False


class WorkerFailed(Value):
    """Event: a worker on this node has failed. Other workers may still be running. The cause's ``time_ns``
    refers to the store's wall clock.
    """

    cause: Cause


class WorkersDone(Value):
    """Event: all workers on this node have exited with code 0, and none of their processes are left."""


class GroupEnded(Value):
    """Event: all processes of this node's workers have exited, except those that even SIGKILL could not kill.

    Without an earlier :class:`Stop` or :class:`WorkerFailed`, this event counts as a failure.

    Args:
        cause: cause of the first failure on this node, with more details than in :class:`WorkerFailed`.
        stuck: description of the processes that SIGKILL did not end; ``None`` if there are none.
        evidence: facts about this node's ranks, for the diagnosis of a hang or a failed collective; see
            :mod:`.node_evidence`. ``None`` if there are none.
        unfit: reason why a check found this node unfit; ``None`` if no check did. The leader decides whether
            to exclude the node.
    """

    cause: Cause | None = None
    stuck: str | None = None
    evidence: bytes | None = None
    unfit: str | None = None


class TimerFired(Value):
    """Event: a timer set by :class:`Arm` has fired."""

    name: str


class Leave(Value):
    """Event: this agent was asked to leave the job. If ``close`` is true, the job ends for all nodes."""

    reason: str
    close: bool = False


class AskForRound(Value):
    """Event: the workers on this node request a new round, although none has failed. The current round ends
    without a failure and does not count as a restart.
    """

    reason: str


class StoreHosted(Value):
    """Event: this process started to serve the coordination store after the rendezvous had begun.
    For the arguments see :class:`~.rendezvous.ThisAgent`.
    """

    fallback_addr: str | None = None
    why_hosts: str | None = None


class StorePort(Value):
    """Event: a new listener for the workers' store is bound to this port."""

    port: int


class StorePortFailed(Value):
    """Event: no listener for the workers' store could be bound, so this node cannot take part in rounds.
    ``message`` gives the reason to the user.
    """

    message: str


# --- actions ---


class Connect(Value):
    """Action: open a new session for this incarnation of the agent (counted from 1). A ``Connected`` or
    ``ConnectionLost`` event follows.
    """

    incarnation: int


class Disconnect(Value):
    """Action: close the connection, and drop all its events that were not delivered."""


class Start(Value):
    """Action: start the workers of a round.

    Args:
        round: number of the round, counted from 1 (``ELASTICRS_ROUND``).
        restarts: number of restarts that the job has used (``TORCHELASTIC_RESTART_COUNT``).
        group_rank: group rank of this node.
        ranks: ranks of this node's first worker, and the world sizes of the round.
        master_addr: address of the node with group rank 0.
        master_port: port of the round's workers' store.
        serves_store: true if this node serves the workers' store. The store then uses the listener of the
            latest :class:`StorePort`. With a fixed port, a worker of this node serves the store instead, and
            :class:`StartFailed` follows if the port cannot be lent to the worker.
        earlier: reason for the end of the previous round. Empty for the first round.
        after_loss: true if the previous round ended because a node was lost.
        delay: restart delay before this round, in seconds.
    """

    round: int
    restarts: int
    group_rank: int
    ranks: NodeRanks
    master_addr: str
    master_port: int
    serves_store: bool
    earlier: str = ""
    after_loss: bool = False
    delay: float = 0.0


class Stop(Value):
    """Action: stop the workers. A :class:`GroupEnded` event follows, or :class:`WorkersDone` if the workers
    finish before they can be stopped.

    Args:
        round: number of the workers' round.
        why: reason, for the log.
        fenced: true to send SIGKILL immediately; otherwise the usual signal and grace period apply.
        hung: cause of the failure if a worker on another node hangs; otherwise ``None``. The hung worker may
            be waiting for a worker of this node.
        planned: true if there is no failure, for example because a node joins or leaves.
        after_failure: true if the round has ended because workers failed, usually on another node.
    """

    round: int
    why: str
    fenced: bool = False
    hung: Cause | None = None
    planned: bool = False
    after_failure: bool = False


class BindStore(Value):
    """Action: bind a new listener for the workers' store. A :class:`StorePort` or :class:`StorePortFailed`
    event follows.
    """


class CloseStore(Value):
    """Action: close the workers' store if this node hosts it; otherwise, close the reserved listener."""


class Arm(Value):
    """Action: set or reset a timer. When it expires, a single :class:`TimerFired` event follows."""

    name: str
    seconds: float


class Disarm(Value):
    """Action: cancel a timer. This has no effect if the timer is not set."""

    name: str


class Announce(Value):
    """Action: show the user a one-line message."""

    text: str


class Outcome(Value):
    """Outcome of the job for this agent.

    Args:
        kind: ``succeeded``; ``failed`` (too many restarts or lost nodes, or workers could not be started;
            ``cause`` and ``message`` contain the reason); ``closed`` (this agent joined after the end of the
            job); ``aborted`` (an agent has closed the job); ``timeout`` (not enough nodes, or the store could
            not be reached); ``left`` (this agent was asked to leave); ``lost`` (the store was lost);
            ``stuck`` (SIGKILL did not end all workers); ``refused`` (settings, command, token, version or
            run id differ); ``spare`` (the job succeeded without this node);
            ``excluded`` (the leader has excluded this node because it appears to be unfit).
        message: message of one line for the user.
        cause: cause of the job's first failure.
        has_failed: for ``closed``, true if the job had neither succeeded nor been closed by an agent; for
            ``spare``, true if this agent is probably not a spare, but was started as a job of its own.
        is_permanent: for ``failed``, true if another attempt would fail in the same way.
    """

    kind: OutcomeKind
    message: str | None = None
    cause: Cause | None = None
    has_failed: bool = False
    is_permanent: bool = False


class Exit(Value):
    """Final action: exit with this outcome."""

    outcome: Outcome


if TYPE_CHECKING:
    WorkersEvent: TypeAlias = StartFailed | WorkerFailed | WorkersDone | GroupEnded
    ListenerEvent: TypeAlias = StoreHosted | StorePort | StorePortFailed
    Event: TypeAlias = StoreEvent | Begin | WorkersEvent | ListenerEvent | TimerFired | Leave | AskForRound
    LoopAction: TypeAlias = Start | Stop | Announce | Exit
    """Actions that concern the workers or the user."""
    Action: TypeAlias = Request | Connect | Disconnect | BindStore | CloseStore | Arm | Disarm | LoopAction
