"""The restart policy: a pure function of the earlier failures, the evidence from all nodes, and the settings.

The agent of one node and the leader of a job on several nodes both call :func:`decide`, so that a failure is
judged by one set of rules:

- **POLICY-1** A failure that another attempt would repeat stops the job at once; see :class:`Permanence`. A
  start error counts only if at least two nodes report one, or if the round has a single node. If only one of
  several nodes reports a start error, that node may be broken, so the workers are restarted.
- **POLICY-2** The job stops after ``max_same_failures`` equal failures in a row without progress. Two
  failures are equal if the same exception was raised at the same place, on the same rank or in the same
  training step (or before the first step). Connection errors do not count, because they are often transient.
- **POLICY-3** At most ``max_restarts`` restarts are charged, in total or within ``window`` seconds.
- **POLICY-4** The decision does not depend on the order in which the nodes report.
"""

from __future__ import annotations

from enum import Enum

from elasticrs.job.failure_cause import Permanence
from elasticrs.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticrs.job.failure_cause import Cause

STEADY = 60.0
"""Number of seconds after which an attempt without heartbeats is assumed to have made progress."""
TRANSIENT = frozenset(
    {
        *("builtins.ConnectionError", "builtins.ConnectionResetError", "builtins.ConnectionAbortedError"),
        *("builtins.ConnectionRefusedError", "builtins.BrokenPipeError", "builtins.TimeoutError"),
        *("torch.distributed.DistBackendError", "torch.distributed.DistNetworkError"),
        *("torch.distributed.DistStoreError", "torch.distributed.DistQueueEmptyError"),
    }
)
"""Types of exceptions that report a lost connection or a timeout."""
MAX_DOUBLINGS = 30
"""Maximum number of times that a delay is doubled. Prevents an overflow after many failures."""


class RestartSettings(Value):
    """Settings of the restart policy.

    Args:
        max_restarts: maximum number of charged restarts.
        window: number of seconds within which ``max_restarts`` applies; ``None`` for the whole job.
        first_delay: seconds to wait before the first restart. The delay doubles with every further failure
            without progress.
        longest_delay: maximum delay in seconds.
        max_same_failures: number of equal failures without progress after which the job stops; 0 for no
            limit.
    """

    max_restarts: int
    window: float | None = None
    first_delay: float = 0.0
    longest_delay: float = 0.0
    max_same_failures: int = 0


class Evidence(Value):
    """Evidence about the end of an attempt.

    Args:
        causes: failures that the nodes have reported, with the root cause first. Empty if none is known.
        nodes: number of nodes that took part in the attempt.
        now: current time in seconds, on a clock that all calls share.
        ran: seconds for which the workers ran; ``None`` if unknown.
        jitter: random number from 0 to 1, which shortens a delay by up to a half.
    """

    causes: tuple[Cause, ...] = ()
    nodes: int = 1
    now: float = 0.0
    ran: float | None = None
    jitter: float = 0.0


NO_EVIDENCE = Evidence()
"""Placeholder for an attempt about which nothing is known."""


class FailureHistory(Value):
    """Summary of the failures of a job so far, as input for later decisions.

    Args:
        charged: number of charged restarts.
        charged_at: times of the charges that are still within the window, in seconds, oldest first. Empty if
            there is no window.
        last: exception type, place, global rank and training step of the last failure; ``None`` if the last
            failure was not an exception.
        same: number of consecutive failures that equal ``last``.
        reached: highest training step that the job has completed; ``None`` if it is unknown.
        without_progress: number of consecutive failures without progress between them.
    """

    charged: int = 0
    charged_at: tuple[float, ...] = ()
    last: tuple[str, str, int | None, int | None] | None = None
    same: int = 0
    reached: int | None = None
    without_progress: int = 0


class StopKind(str, Enum):
    """Kind of reason to stop the job instead of restarting its workers."""

    PERMANENT = "permanent"
    """Another attempt would fail in the same way."""
    EXHAUSTED = "exhausted"
    """The restart budget is used up."""

    __str__ = str.__str__


class RestartDecision(Value):
    """Decision about a failure.

    Args:
        history: the history, including this failure.
        stop: kind of reason to stop the job; ``None`` if the workers are restarted.
        reason: the reason to stop, for the user; empty if the workers are restarted.
        delay: seconds to wait before the restart.
    """

    history: FailureHistory
    stop: StopKind | None = None
    reason: str = ""
    delay: float = 0.0


def decide(settings: RestartSettings, history: FailureHistory, evidence: Evidence) -> RestartDecision:
    """Decide whether the workers are restarted after a failure that is charged to the restart budget.

    Args:
        settings: settings of the policy.
        history: failures before this one.
        evidence: evidence about this failure.
    """
    after = _with_failure(history, evidence.causes, evidence.ran)
    reason = why_permanent(evidence) or _why_repeated(settings, after)
    if reason is not None:
        return RestartDecision(after, StopKind.PERMANENT, reason)
    charged_at: tuple[float, ...] = ()
    used, limit = history.charged, f"max_restarts={settings.max_restarts}"
    if settings.window is not None:
        charged_at = recent(settings, history, evidence.now)
        used, limit = len(charged_at), f"{limit} in {settings.window:g} s"
        charged_at = (*charged_at, evidence.now)
    if used >= settings.max_restarts:
        return RestartDecision(after, StopKind.EXHAUSTED, f"no restart is left ({limit}, {used} used)")
    charged = after.replaced(charged=history.charged + 1, charged_at=charged_at)
    doublings = min(after.without_progress - 1, MAX_DOUBLINGS)
    delay = min(settings.first_delay * 2**doublings, max(settings.longest_delay, settings.first_delay))
    return RestartDecision(charged, delay=delay * (1 - evidence.jitter / 2))


def recent(settings: RestartSettings, history: FailureHistory, now: float) -> tuple[float, ...]:
    """Return the times of the charges that are within the window, in seconds."""
    since = now - settings.window if settings.window is not None else now
    return tuple(time for time in history.charged_at if time > since)


def _with_failure(history: FailureHistory, causes: Sequence[Cause], ran: float | None) -> FailureHistory:
    steps = [cause.reached for cause in causes if cause.reached is not None]
    reached = max(steps, default=None)
    if reached is None:
        has_progressed = ran is not None and ran >= STEADY
    else:
        has_progressed = history.reached is None or reached > history.reached
    first = causes[0] if causes else None
    last = None
    if first is not None and first.exception not in (None, *TRANSIENT) and first.place is not None:
        last = (str(first.exception), first.place, first.rank, reached)
    is_same = not has_progressed and last is not None and _are_same(history.last, last)
    highest = [step for step in (history.reached, reached) if step is not None]
    return history.replaced(
        last=last,
        same=history.same + 1 if is_same else int(last is not None),
        reached=max(highest, default=None),
        without_progress=1 if has_progressed else history.without_progress + 1,
    )


def _are_same(
    one: tuple[str, str, int | None, int | None] | None, other: tuple[str, str, int | None, int | None]
) -> bool:
    if one is None or one[:2] != other[:2]:
        return False
    # Without heartbeats, the steps are unknown. Two unknown steps count as equal.
    return one[2] == other[2] or one[3] == other[3]


def why_permanent(evidence: Evidence) -> str | None:
    """Return the reason why another attempt would fail in the same way (POLICY-1). Return ``None`` if the
    evidence shows no such reason.
    """
    # Sort by rank, because the decision may not depend on the order of the reports.
    known = sorted((cause for cause in evidence.causes if cause.permanence in _KINDS), key=_order)
    starts = [cause for cause in known if cause.permanence == Permanence.START_ERROR]
    if starts and len({cause.node for cause in starts}) >= min(2, evidence.nodes):
        first = starts[0]
        return f"{_who(first)} failed while the program started ({first.permanent_sign}): not transient"
    for cause in known:
        if cause.permanence == Permanence.NON_RETRYABLE:
            return f"{_who(cause)} raised an error that must not be retried ({cause.permanent_sign})"
        if cause.permanence == Permanence.EXIT_CODE:
            return f"{_who(cause)} exited with a fatal exit code ({cause.permanent_sign})"
    return None


def _why_repeated(settings: RestartSettings, history: FailureHistory) -> str | None:
    most, last = settings.max_same_failures, history.last
    if not most or last is None or history.same < most:
        return None
    exception, place, rank, step = last
    where = f" in step {step}" if step is not None else "" if rank is None else f" on rank {rank}"
    name = exception.rpartition(".")[2]
    return f"the same {name} at {place}{where}, {history.same} times without progress: not transient"


_KINDS = frozenset(each.value for each in Permanence)


def _order(cause: Cause) -> tuple[float, str, str]:
    rank = cause.permanent_rank
    return (float("inf") if rank is None else rank, str(cause.permanence), str(cause.node))


def _who(cause: Cause) -> str:
    rank = cause.permanent_rank
    return f"a worker on node {cause.node}" if rank is None else f"rank {rank}"
