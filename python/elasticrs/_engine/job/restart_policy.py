"""The restart policy: a pure function of the settings, the earlier failures and the reports of all nodes.
Each report is a :class:`Cause`, which describes a failure.

The agent of one node and the leader of several nodes both call :func:`decide`:

- **POLICY-1** A failure that another attempt would repeat stops the job immediately; see :class:`Permanence`.
  A start error stops the job only if no earlier attempt got past the start of the program. In addition, the
  round must have a single node, or two nodes must report a start error in the same round, or report the same
  start error in consecutive rounds. Otherwise, the only node that reports it may be broken, so the workers
  are restarted.
- **POLICY-2** The job stops after ``max_same_failures`` equal failures in a row without progress. Equal
  failures have the same kind (exception type, hang, or signal of a crash) and place, on the same rank or in
  the same training step. Connection errors do not count, because they are often transient, nor do damaged
  copies of the training state (:data:`DAMAGED`), because later attempts do not use them. A higher step is
  progress, if steps are counted across restarts. Otherwise, an attempt that ran for :data:`STEADY` seconds
  has made progress. A shorter attempt may have made progress if its workers completed steps or hung: the job
  then stops only after :data:`UNPROVEN` times as many equal failures after the same number of steps.
- **POLICY-3** At most ``max_restarts`` restarts are charged, in total or within ``window`` seconds.
- **POLICY-4** The decision does not depend on the order in which the nodes report.
- **POLICY-5** The job stops if its only node was found unfit and cannot be excluded. Otherwise, at most one
  node per failure is excluded. This is a node whose own check found it unfit, or the only node that reports a
  start error, once it is implicated for the second time. No node is excluded in three cases: more than
  ``max_excluded_nodes`` nodes in total or more than half of the round's nodes would have to be excluded;
  fewer than the minimum number of nodes would remain; all suspect nodes are in ``Evidence.bound``.
"""

from __future__ import annotations

from enum import Enum
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP

from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, TypeAlias

    Meetings: TypeAlias = tuple[int | None, ...]
    """The last rendezvous round that each worker joined, by local rank; ``None`` if it recorded none."""

STEADY = 60.0
"""Seconds after which an attempt has made progress, unless steps are counted across restarts."""
UNPROVEN = 3
"""Factor for ``max_same_failures`` if equal steps may be of different epochs, each of which begins at 0."""
CRASHES: dict[int, str] = {
    each: each.name for each in (SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGSYS)
}
"""Signals that errors of a program cause. Other signals usually come from other processes."""
DAMAGED = "elasticrs._engine.inside.keep.file.DamagedCopyError"
"""Exception type of a rank whose copy of the training state is damaged. The next attempt uses another one."""
HANG = "hang"
"""Kind of a failure if the workers hung. Otherwise, it is an exception type or a signal name."""
MAX_DOUBLINGS = 30
"""Maximum number of times that a delay is doubled, to prevent an overflow after many failures."""
MAX_SUSPECTS = 8
"""Maximum number of suspect nodes in the history and in a message."""
IMPLICATED_TWICE = 2
"""Number of failures that implicate a node before it is excluded, unless its own check finds it unfit."""


class Permanence(str, Enum):
    """Reason why another attempt would fail in the same way."""

    NON_RETRYABLE = "non_retryable"
    """A worker raised ``NonRetryable``, or its error file contains ``"retryable": false``."""
    EXIT_CODE = "exit_code"
    """A worker exited with one of ``--fatal-exit-codes``."""
    START_ERROR = "start_error"
    """No failed worker could start its program: it is missing or broken, or rejected its arguments."""

    __str__ = str.__str__


class Verdict(str, Enum):
    """Advice on a failed job to the scheduler that has started it."""

    FAILED = "failed"
    PERMANENT = "permanent"
    UNFIT = "unfit"
    """This node cannot run the job, but another node may."""

    __str__ = str.__str__


class Cause(Value):
    """First failure in a rendezvous round. Unknown fields are ``None``.

    Args:
        node: name of the failed worker's node in the rendezvous.
        rank: global rank of the worker; ``None`` if the workers could not be started.
        exitcode: as in ``ProcessFailure``, but ``None`` for a worker that was stopped after an exception.
        message: shortened traceback or other description.
        how: phrase to append to the worker's name; see :func:`.how_it_failed`.
        lines: last lines of the worker's stderr, shortened.
        xids: errors of NVIDIA's driver on that node during the attempt, one line each.
        ground: why a hung worker is blamed, instead of another that missed its deadline (see ``WorkerHung``).
        silence: seconds since the worker's last heartbeat, if it hung.
        step: training step in which the worker hung; -1 if it never sent a step.
        frame: text about the stack frame in which the worker hung, as in ``RankSeen``.
        time_ns: time of the failure, in nanoseconds of the store's wall clock.
        error_ns: maximum error of ``time_ns``.
        exception: qualified name of the type of the worker's uncaught exception.
        place: file and line of the program that raised it, such as ``train.py:88``.
        permanence: value of :class:`Permanence`.
        permanent_rank: global rank of the worker that determined ``permanence``; may differ from ``rank``.
        permanent_sign: that worker's failure, such as ``ValueError at train.py:88`` or ``exit code 3``.
        is_consequence: true if the exception only reports that a peer is lost or silent; otherwise ``None``.
        is_transient: true if the exception only reports a lost connection or a timeout; otherwise ``None``.
        was_killed: true if the worker was killed only by elasticrs, or because the nursery (the process that
            starts the workers) was lost; otherwise ``None``.
        reached: last training step that any worker of the node has completed; ``None`` without heartbeats.
        is_global: true if ``reached`` is counted across restarts (``heartbeat(step, across_restarts=True)``).
        ran: seconds from the start of the workers until the failure, or until the hang began.
        diagnosis: text about the ranks that kept the other ranks waiting, by the evidence of all nodes.
        blamed: ranks to blame for a hang, if not ``rank``, such as ``undecided, candidates: ranks 0, 1``.
    """

    node: str | None = None
    host: str | None = None
    group_rank: int | None = None
    round: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    exitcode: int | None = None
    message: str | None = None
    how: str | None = None
    lines: Sequence[str] = ()
    xids: Sequence[str] = ()
    ground: str | None = None
    silence: float | None = None
    step: int | None = None
    frame: str | None = None
    time_ns: int | None = None
    error_ns: int | None = None
    exception: str | None = None
    place: str | None = None
    permanence: str | None = None
    permanent_rank: int | None = None
    permanent_sign: str | None = None
    is_consequence: bool | None = None
    is_transient: bool | None = None
    was_killed: bool | None = None
    reached: int | None = None
    is_global: bool | None = None
    ran: float | None = None
    diagnosis: str | None = None
    blamed: str | None = None

    def encoded(self) -> dict[str, Any]:
        return {name: value for name, value in self.fields().items() if value is not None and value != ()}

    @staticmethod
    def decoded(fields: Mapping[str, Any]) -> Cause:
        """Create a cause from checked fields. Ignore unknown fields, which another release may send."""
        return Cause(**{name: fields[name] for name in Cause._names if name in fields})


NO_CAUSE = Cause()


class RestartSettings(Value):
    """Settings of the restart policy. ``max_excluded_nodes`` is ``None`` if this job never excludes nodes.

    Args:
        window: seconds within which ``max_restarts`` applies; ``None`` for the whole job.
        first_delay: seconds before the first restart. Doubles with every further failure without progress.
        longest_delay: maximum delay in seconds.
        max_same_failures: 0 for no limit.
    """

    max_restarts: int
    window: float | None = None
    first_delay: float = 0.0
    longest_delay: float = 0.0
    max_same_failures: int = 0
    max_excluded_nodes: int | None = None


class Evidence(Value):
    """Evidence about why an attempt ended.

    Args:
        causes: failures that the nodes have reported, with the root cause first.
        nodes: number of nodes that took part in the attempt.
        now: time in seconds, on a clock that all calls share.
        ran: seconds for which the workers ran, less exact than :attr:`.Cause.ran`; ``None`` if unknown.
        jitter: random number from 0 to 1, which shortens a delay by up to a half.
        unfit: nodes whose own check found them unfit after this failure, each with the reason.
        bound: nodes that cannot be excluded, each with the reason.
        available: number of nodes that are ready for the next round.
    """

    causes: tuple[Cause, ...] = ()
    nodes: int = 1
    now: float = 0.0
    ran: float | None = None
    jitter: float = 0.0
    unfit: tuple[tuple[str, str], ...] = ()
    bound: tuple[tuple[str, str], ...] = ()
    available: int = 1
    min_nodes: int = 1


NO_EVIDENCE = Evidence()


class FailureHistory(Value):
    """Summary of a job's failures so far.

    Args:
        charged_at: times of charged restarts in the window, in seconds, oldest first. Empty without a window.
        last: kind, place, global rank and step of the last failure; ``None`` if it cannot be compared.
        same: number of consecutive failures that equal ``last``.
        reached: highest completed training step; ``None`` if steps are not counted across restarts.
        has_started: true if an attempt has got past the start of the program.
        without_progress: number of consecutive failures without progress between them.
        start_error: node and description, if the last failure was a start error that only this node reported.
        implicated: suspect nodes, each with its number of failures. The latest is last.
        excluded: number of nodes excluded so far.
    """

    charged: int = 0
    charged_at: tuple[float, ...] = ()
    last: tuple[str, str, int | None, int | None] | None = None
    same: int = 0
    reached: int | None = None
    has_started: bool = False
    without_progress: int = 0
    start_error: tuple[str, str] | None = None
    implicated: tuple[tuple[str, int], ...] = ()
    excluded: int = 0


class RestartDecision(Value):
    """Decision whether the workers are restarted after a failure. ``history`` includes this failure. If the
    job stops, ``stop`` is the verdict and ``reason`` says why: ``FAILED`` if no restart is left, ``UNFIT`` if
    the failures occur on unfit nodes that cannot be excluded, otherwise ``PERMANENT``. ``delay`` is the
    number of seconds before a restart, ``exclude`` a node to exclude, and ``note`` a text about suspect
    nodes.
    """

    history: FailureHistory
    stop: Verdict | None = None
    reason: str = ""
    delay: float = 0.0
    exclude: str | None = None
    note: str = ""


def decide(settings: RestartSettings, history: FailureHistory, evidence: Evidence) -> RestartDecision:
    """Decide whether to restart the workers after a failure that is not in ``history`` yet. The decision's
    history includes the failure, and the charge for the restart.
    """
    after = _with_failure(history, evidence)
    reason = why_permanent(evidence, history) or _why_start_error_moved(history, after)
    if reason is not None:
        return RestartDecision(after, Verdict.PERMANENT, reason)
    excluding = exclude(settings, after, evidence)
    if excluding.exclude is None:
        kind, reason = _why_useless(settings, excluding.history, evidence)
        if reason is not None:
            return RestartDecision(excluding.history, kind, reason)
    charged_at: tuple[float, ...] = ()
    used, limit = history.charged, f"max_restarts={settings.max_restarts}"
    if settings.window is not None:
        charged_at = recent(settings, history, evidence.now)
        used, limit = len(charged_at), f"{limit} in {settings.window:g} s"
        charged_at = (*charged_at, evidence.now)
    if used >= settings.max_restarts:
        stopped = excluding.history.replaced(excluded=history.excluded)
        return RestartDecision(stopped, Verdict.FAILED, f"no restart is left ({limit}, {used} used)")
    charged = excluding.history.replaced(charged=history.charged + 1, charged_at=charged_at)
    doublings = min(after.without_progress - 1, MAX_DOUBLINGS)
    delay = min(settings.first_delay * 2**doublings, max(settings.longest_delay, settings.first_delay))
    return excluding.replaced(history=charged, delay=delay * (1 - evidence.jitter / 2))


def exclude(settings: RestartSettings, history: FailureHistory, evidence: Evidence) -> RestartDecision:
    """Decide which node to exclude from the job, if any (POLICY-5), after a failure that is not permanent."""
    history = history.replaced(has_started=_has_started(history, evidence))
    unfit = dict(sorted(evidence.unfit))
    reasons = dict(unfit)
    start_error = _start_error_of_one_node(evidence)
    if start_error is not None:
        node, sign = start_error
        reasons.setdefault(node, f"only this node failed to start the program ({sign})")
    if settings.max_excluded_nodes is None or not reasons:
        return RestartDecision(history)
    times = dict(history.implicated)
    for node in reasons:
        # Move the node to the end, because only the last ``MAX_SUSPECTS`` entries are kept.
        times[node] = times.pop(node, 0) + 1
    after = history.replaced(implicated=tuple(times.items())[-MAX_SUSPECTS:])
    suspects = [node for node in reasons if node in unfit or times[node] >= IMPLICATED_TWICE]
    # Sort the most implicated node first. On a tie, a node that failed its own check comes first.
    suspects.sort(key=lambda node: (-times[node], node not in unfit, node))
    why_kept = _why_kept(settings.max_excluded_nodes, history.excluded, suspects, evidence)
    if why_kept is not None:
        kept = suspects or list(reasons)
        names, are = (f"node {kept[0]}", "is") if len(kept) == 1 else (f"nodes {_named(kept)}", "are")
        note = f"{names} may be unfit, but {are} not excluded ({why_kept}): {reasons[kept[0]]}"
        return RestartDecision(after, note=note)
    bound = dict(evidence.bound)
    node = next(node for node in suspects if node not in bound)
    after = after.replaced(excluded=history.excluded + 1, same=0)
    return RestartDecision(after, exclude=node, note=f"node {node} is excluded from the job: {reasons[node]}")


def _named(nodes: Sequence[str]) -> str:
    shown = ", ".join(nodes[:MAX_SUSPECTS])
    return shown if len(nodes) <= MAX_SUSPECTS else f"{shown} and {len(nodes) - MAX_SUSPECTS} more"


def _why_kept(most: int, excluded: int, suspects: Sequence[str], evidence: Evidence) -> str | None:
    bound = dict(evidence.bound)
    if excluded + max(1, len(suspects)) > most:
        return f"max_excluded_nodes={most}, {excluded} excluded so far"
    if not suspects:
        return "it will be excluded if this happens again"
    if 1 < len(suspects) > evidence.nodes / 2:
        return f"{len(suspects)} of {evidence.nodes} nodes would be excluded, so the check may be wrong"
    if evidence.available - 1 < evidence.min_nodes:
        return f"without it, fewer than {evidence.min_nodes} nodes would remain"
    return bound[suspects[0]] if bound.keys() >= set(suspects) else None


def recent(settings: RestartSettings, history: FailureHistory, now: float) -> tuple[float, ...]:
    """Return the times, in seconds, of the restarts that count against the budget in the current window."""
    since = now - settings.window if settings.window is not None else now
    return tuple(time for time in history.charged_at if time > since)


def is_suspect(history: FailureHistory, node: str) -> bool:
    return dict(history.implicated).get(node, 0) >= IMPLICATED_TWICE


def _with_failure(history: FailureHistory, evidence: Evidence) -> FailureHistory:
    reached = _reached(evidence)
    if _are_steps_global(evidence):
        has_progressed = history.reached is None or (reached or 0) > history.reached
    else:
        ran = _ran(evidence)
        has_progressed = ran is not None and ran >= STEADY
    last = _identity(evidence, history)
    is_same = not has_progressed and last is not None and _are_same(history.last, last, evidence)
    highest = [history.reached, reached if _are_steps_global(evidence) else None]
    return history.replaced(
        last=last,
        same=history.same + 1 if is_same else int(last is not None and last[0] != DAMAGED),
        reached=max((step for step in highest if step is not None), default=None),
        has_started=_has_started(history, evidence),
        without_progress=1 if has_progressed else history.without_progress + 1,
        start_error=_start_error_of_one_node(evidence),
    )


def _identity(evidence: Evidence, history: FailureHistory) -> tuple[str, str, int | None, int | None] | None:
    """Return kind, place, rank and step of the root cause; ``None`` if it cannot be compared with others."""
    first, step = evidence.causes[0] if evidence.causes else NO_CAUSE, _reached(evidence)
    # A start error of a program that has started before is transient: a file system may have failed briefly.
    is_late_start = first.permanence == Permanence.START_ERROR and history.has_started
    if first.is_transient or is_late_start:
        return None
    if first.silence is not None:
        return HANG, first.place or "", first.rank, step
    if first.exception is not None:
        return None if first.place is None else (first.exception, first.place, first.rank, step)
    # Compare crashes by step, because the line of the program is unknown.
    crash = None if step is None or first.is_consequence else CRASHES.get(-(first.exitcode or 0))
    return None if crash is None else (crash, "", first.rank, step)


def _reached(evidence: Evidence) -> int | None:
    return max((cause.reached for cause in evidence.causes if cause.reached is not None), default=None)


def _are_steps_global(evidence: Evidence) -> bool:
    counted = [cause.is_global for cause in evidence.causes if cause.reached is not None]
    return bool(counted) and all(counted)


def _ran(evidence: Evidence) -> float | None:
    """Return the seconds from the workers' start to the first failure, or to the start of the hang."""
    exact = (evidence.causes[0] if evidence.causes else NO_CAUSE).ran
    return evidence.ran if exact is None else exact


def _has_started(history: FailureHistory, evidence: Evidence) -> bool:
    """Return true if the program got past its start on all nodes, in this attempt or an earlier one."""
    if evidence.causes:
        return history.has_started or not _start_errors(evidence)
    return history.has_started or (evidence.ran is not None and evidence.ran >= STEADY)


def _start_error_of_one_node(evidence: Evidence) -> tuple[str, str] | None:
    starts = _start_errors(evidence)
    nodes = {cause.node for cause in starts}
    if evidence.nodes == 1 or len(nodes) != 1 or starts[0].node is None:
        return None
    return starts[0].node, str(starts[0].permanent_sign)


def _why_start_error_moved(before: FailureHistory, now: FailureHistory) -> str | None:
    """Return why to stop if two nodes reported the same start error in consecutive rounds. Only one node per
    round reports it, because the first failure stops all workers.
    """
    if before.start_error is None or now.start_error is None or before.has_started:
        return None
    (one, sign), (other, same) = before.start_error, now.start_error
    if one == other or sign != same:
        return None
    return f"workers on nodes {one} and {other} failed while the program started ({sign}): not transient"


def _are_same(
    one: tuple[str, str, int | None, int | None] | None,
    other: tuple[str, str, int | None, int | None],
    evidence: Evidence,
) -> bool:
    if one is None or one[0] != other[0] or one[0] == DAMAGED:
        return False
    # The place of a hang is unknown if the worker did not send its stack in time.
    if one[1] != other[1] and not (other[0] == HANG and "" in (one[1], other[1])):
        return False
    # Without heartbeats, the step is unknown (``None``) in every failure.
    return one[3] == other[3] or (_are_steps_global(evidence) and one[2] == other[2])


def why_permanent(evidence: Evidence, history: FailureHistory) -> str | None:
    """Return why a restart would fail alike, if so (POLICY-1). ``history`` has only the earlier failures."""
    starts = _start_errors(evidence)
    is_everywhere = len({cause.node for cause in starts}) >= min(2, evidence.nodes)
    if starts and is_everywhere and not history.has_started:
        first = starts[0]
        return f"{_who(first)} failed while the program started ({first.permanent_sign}): not transient"
    for cause in _permanent(evidence):
        if cause.permanence == Permanence.NON_RETRYABLE:
            return f"{_who(cause)} raised an error that must not be retried ({cause.permanent_sign})"
        if cause.permanence == Permanence.EXIT_CODE:
            return f"{_who(cause)} exited with a fatal exit code ({cause.permanent_sign})"
    return None


def _permanent(evidence: Evidence) -> list[Cause]:
    # Sort by rank, because the decision must not depend on the order of the reports.
    return sorted((cause for cause in evidence.causes if cause.permanence in _KINDS), key=_order)


def _start_errors(evidence: Evidence) -> list[Cause]:
    return [cause for cause in _permanent(evidence) if cause.permanence == Permanence.START_ERROR]


def _why_useless(
    settings: RestartSettings, history: FailureHistory, evidence: Evidence
) -> tuple[Verdict, str | None]:
    unfit = dict(evidence.unfit)
    if settings.max_excluded_nodes is not None and unfit and evidence.nodes == 1:
        node, why = min(unfit.items())
        return Verdict.UNFIT, f"node {node} is unfit, and no other node could replace it: {why}"
    repeated = _why_repeated(settings, history, evidence)
    starts = _start_error_of_one_node(evidence)
    if repeated is not None and starts is not None and is_suspect(history, starts[0]):
        # The failure is not permanent, because the program starts on all other nodes.
        return Verdict.UNFIT, f"{repeated}, and only on node {starts[0]}"
    return Verdict.PERMANENT, repeated and f"{repeated}: not transient"


def _why_repeated(settings: RestartSettings, history: FailureHistory, evidence: Evidence) -> str | None:
    if history.last is None:
        return None
    kind, place, rank, step = history.last
    is_proven = _are_steps_global(evidence) or (not step and kind != HANG)
    most = settings.max_same_failures * (1 if is_proven else UNPROVEN)
    if not most or history.same < most:
        return None
    at = f" at {place}" if place else ""
    where = f" in step {step}" if step is not None else "" if rank is None else f" on rank {rank}"
    return f"the same {kind.rpartition('.')[2]}{at}{where}, {history.same} times without progress"


_KINDS = frozenset(each.value for each in Permanence)


def _order(cause: Cause) -> tuple[float, str, str, str]:
    rank = cause.permanent_rank
    return (
        *(float("inf") if rank is None else rank, str(cause.permanence), str(cause.node)),
        str(cause.permanent_sign),
    )


def _who(cause: Cause) -> str:
    rank = cause.permanent_rank
    return f"a worker on node {cause.node}" if rank is None else f"rank {rank}"


def has_not_met_since(then: Meetings, now: Meetings, place: int) -> bool:
    """Return true if a worker (local rank ``place``) has joined no rendezvous since the last failure for
    which a restart was charged. Then its own failure is not charged, because the earlier failure caused it.
    """
    at = then[place] if place < len(then) else None
    return at is not None and now[place : place + 1] == (at,)


def without(then: Meetings, place: int) -> Meetings:
    """Return ``then`` without the rendezvous round of a worker that was replaced."""
    return tuple(None if each == place else at for each, at in enumerate(then))
