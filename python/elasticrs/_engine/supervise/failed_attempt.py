"""Describes why an attempt of the workers has failed.

While the workers are being stopped, only the agent's events tell which worker failed first. No file is read
then, because a slow file system would delay the stop and the report to other nodes. After the attempt, the
workers' files are read as well. The failures become torch's ``ProcessFailure`` objects, and the first one
becomes a :class:`.Cause` for the other nodes and the restart policy.
"""

from __future__ import annotations

import os
import signal
import time

from elasticrs._engine.failures.failure import (
    NOT_AVAILABLE,
    Clock,
    ProcessFailure,
    failed_ns,
    failure_of,
    hang_file,
    how_it_failed,
    root_cause,
    traceback_text,
    victims,
)
from elasticrs._engine.job import phrases
from elasticrs._engine.job.phrases import shortened, summarize
from elasticrs._engine.job.restart_policy import STEADY, Cause, Evidence, Permanence
from elasticrs._engine.job.value import Value
from elasticrs._engine.process.background_call import FILE_LIMIT
from elasticrs._engine.supervise.attempt import BY_OOM_KILLER, oom_note, probably_oom

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Any

    from elasticrs import _core
    from elasticrs._engine.supervise.attempt import Attempt

MAX_MESSAGE = 1400
"""Maximum characters of a message. :func:`.shortened` cuts the start of a longer one, because the end of a
traceback says the most.
"""

BEFORE_ALL_STEPS = -1
"""Step that is reported for a rank that missed the deadline of its first heartbeat."""

MAX_LINES = 8
MAX_XIDS = 4
MAX_LINE = 120

_UNREAD = f"its error file could not be read within {FILE_LIMIT:g} s"


# --- which worker failed first, by the agent's events alone ---


def early_leavers(
    attempt: Attempt, if_unknown: Callable[[Attempt], bool] = lambda _: False
) -> tuple[int, ...]:
    """Return the ranks that exited with code 0 before the first failure, if that failure only reports a lost
    peer. The lost peer is then one of these ranks. Return no ranks if the job has workers on other nodes, or
    if each worker is a member of the rendezvous itself. Return none either if most workers have exited with
    code 0, because the failed one may then have run more steps. ``if_unknown`` decides whether the first
    failure only reports a lost peer if that worker's exception is unknown, for example after an instant exit.
    """
    left = attempt.leavers()
    if not left:
        return ()
    if attempt.blame is not None:
        return left if attempt.blame.basis == "exit" and attempt.blame.is_decided else ()
    if attempt.first_failure is None:
        return ()
    failure = attempt.raised.get(attempt.first_failure)
    is_lost_peer = if_unknown(attempt) if failure is None else failure.origin == "peer"
    return left if is_lost_peer else ()


def first_seen(attempt: Attempt) -> int:
    """Return the local rank of the worker that failed first. Its peers may have exited before it: after an
    exception, a worker closes its connections before it exits, and that may make its peers fail.
    """
    first = attempt.first_failure
    assert first is not None
    if not attempt.raised.keys() - {first} or first in attempt.expired:
        return first
    exited = attempt.exits.get(first)
    end_ns = exited.seen_ns if exited is not None else attempt.stamps["failure_seen"]
    seen = {}
    for local_rank in sorted({first, *attempt.raised}):
        seen[local_rank] = failure = seen_failure(attempt, local_rank)
        failure.seen_ns = end_ns
        # Treat the other workers as stopped by the agent, because it is already stopping them.
        failure.sent_signal = None if local_rank == first else signal.SIGTERM
        if failure.recorded_pid is not None:
            failure.pid = failure.recorded_pid
    return root_cause(seen)


def seen_failure(attempt: Attempt, local_rank: int) -> ProcessFailure:
    """Return a worker's failure as far as the supervisor's events describe it, without reading a file."""
    worker, raised = attempt.exits.get(local_rank), attempt.raised.get(local_rank)
    event = attempt.expired.get(local_rank) or raised or worker
    why = why_it_failed(attempt, local_rank)
    how = how_by_evidence(attempt, local_rank)
    failure = ProcessFailure(
        local_rank,
        attempt.pids[local_rank] if worker is None else worker.pid,
        None if worker is None else worker.exitcode,
        "",
        seen_ns=None if event is None else event.seen_ns,
        sent_signal=None if worker is None else worker.sent_signal,
        cause=why if raised is None or how is not None else raised.text,
        how=" failed" if event is None else how,
    )
    if raised is not None:
        failure.recorded_ns, failure.recorded_pid = raised.seen_ns, raised.pid
        failure.is_lost_peer = raised.origin == "peer"
    return failure


def why_expired(attempt: Attempt, local_rank: int) -> str | None:
    """Describe the time limit that a worker exceeded before the agent killed it; ``None`` if none."""
    event = attempt.expired.get(local_rank)
    if event is None:
        return None
    if event.timer is not None:
        return phrases.timer_expired(event.timer)
    if event.raised is not None:
        was = "was still exiting" if event.raised.exit == "slow" else "its exit made no progress"
        return f"it raised an exception, and {was} {event.raised.limit:g} s later (--exit-timeout)"
    if event.hung is None and not event.is_blamed:
        return None
    try:
        from elasticrs._engine.supervise.hang_diagnosis import why_blamed

        return why_blamed(attempt, event, local_rank)
    # An error in the code that writes this text must not end the job without a report.
    except Exception as error:
        from elasticrs._engine.hangs.diagnose import failed

        return f"{'failed' if event.hung is None else 'hung'}; {failed(error).summary}"


def why_it_failed(attempt: Attempt, local_rank: int) -> str | None:
    """Return why a worker failed, if that is known, and its exit code and exception do not show it."""
    worker = attempt.exits.get(local_rank)
    if local_rank in attempt.expired:
        return why_expired(attempt, local_rank)
    if worker is not None and attempt.nursery_end is not None:
        return f"{attempt.nursery_end}, which killed the worker"
    if local_rank in attempt.silent:
        return phrases.SILENT
    if worker is not None and worker.exitcode is None:
        return "the worker has exited, but its exit status is unknown"
    return None


def how_by_evidence(attempt: Attempt, local_rank: int) -> str | None:
    """Return :func:`why_it_failed` as a phrase; ``None`` if exit code or exception tell the user more."""
    why = why_it_failed(attempt, local_rank)
    # If the worker was merely slow to exit, do not report the time limit that it exceeded.
    if why is None or attempt.is_slow_to_exit(local_rank):
        return None
    return f" {why}" if why == phrases.SILENT else f": {why}"


def _how_it_hung(attempt: Attempt, event: _core.WorkerHung) -> str:
    if attempt.blame is not None and attempt.is_undecided:
        left = phrases.ranks_text(attempt.left_before(event.seen_ns))
        is_exit = attempt.blame.basis == "exit"
        return f": {left} exited with code 0, then others hung" if is_exit else ": a rank hangs"
    if attempt.blame is not None and attempt.blame.basis == "records":
        return f" {'keeps' if len(attempt.blame.ranks) == 1 else 'keep'} the other ranks waiting"
    # If several ranks are silent, and there are no logs of collectives, only the first to stop is known.
    is_alone = sum(seen.is_late for seen in event.ranks) < 2
    return " has hung" if is_alone or event.ground == "stopped" else " stopped first"


def how_it_was_seen(attempt: Attempt, local_rank: int) -> str:
    """Return a phrase to append to a failed worker's name, such as `` raised KeyError`` or `` died by
    SIGKILL``. It omits the exception's text, because the report or the line about the restart contains it.
    """
    raised, worker = attempt.raised.get(local_rank), attempt.exits.get(local_rank)
    overdue = attempt.expired.get(local_rank)
    if overdue is not None and overdue.hung is not None:
        return _how_it_hung(attempt, overdue.hung)
    if overdue is not None and overdue.timer is not None:
        return " has hung"
    if overdue is not None and overdue.is_blamed:
        who = f": {attempt.who(local_rank)}" if attempt.is_undecided else ""
        return f"{who} {why_expired(attempt, local_rank)}"
    # If a signal of another program killed a worker while it exited after an exception, name the signal.
    is_killed = worker is not None and worker.sent_signal is None and (worker.exitcode or 0) < 0
    said = None
    if raised is not None and not is_killed:
        found = summarize(raised.text)
        name = None if found is None or found.exception is None else found.exception.rpartition(".")[2]
        said = f" raised {name or 'an exception'}"
    if worker is None and attempt.is_slow_to_exit(local_rank):
        return f"{said or ' raised an exception'} and is still exiting"
    if said is not None:
        return said
    if overdue is not None:
        return " raised an exception and does not exit"
    return " failed" if worker is None else f" {attempt.how_it_ended(worker)}"


def is_collective_failure(attempt: Attempt) -> bool:
    """Return true if another rank may have caused the first failure, because it made a collective fail. That
    is so in these cases:

    - The ranks that the agent blames exited with code 0 while other ranks still waited for them.
    - No time limit expired, and the first failure is an exception that reports a lost or silent peer.
    - No time limit expired, the worker raised no exception, and a worker died by SIGABRT. gloo and NCCL's
      watchdog end their process in this way.
    """
    if attempt.blame is not None and attempt.blame.basis == "exit":
        return attempt.blame.is_decided
    if attempt.first_failure is None or attempt.first_failure in attempt.expired:
        return False
    raised = attempt.raised.get(first_seen(attempt))
    return attempt.aborted() is not None if raised is None else raised.origin == "peer"


# --- the failures of all workers, with what their files say ---


def failures(attempt: Attempt) -> dict[int, ProcessFailure]:
    """Return the failures of workers, by global rank. The first entry is the worker that failed first."""
    ranks = attempt.global_ranks()
    exits = attempt.failed_exits()
    read = attempt.files.run(lambda: [_failure(attempt, worker) for worker in exits], None)
    if read is None:
        read = [_failure(attempt, worker, _UNREAD) for worker in exits]
    found = {ranks[worker.local_rank]: failure for worker, failure in zip(exits, read, strict=True)}
    first = next(iter(found.values()), None)
    # Mark the first failure only if its worker is to blame for the hang. If the worker to blame has survived
    # SIGKILL, the first exit is that of another worker.
    why = None if first is None else attempt.expired.get(first.local_rank)
    if first is not None and attempt.blame is not None and why is not None and why.is_blamed:
        first.is_first = True
    if found and attempt.xids:
        _add_xids(attempt, found)
    return found


def _add_xids(attempt: Attempt, failed: Mapping[int, ProcessFailure]) -> None:
    """Add each Xid (an error of NVIDIA's driver) to the failures of the workers that it concerns, or to the
    first failure if these workers are unknown.
    """
    first = next(iter(failed.values()))
    for xid in reversed(attempt.xids.values()):
        owners = [failure for failure in failed.values() if failure.pid in xid.workers]
        for failure in owners or [first]:
            failure.more_notes = [xid.note(), *failure.more_notes]


def reports_lost_peer(attempt: Attempt) -> bool:
    """Return true if the root cause of a failed attempt is an exception that only reports a lost peer."""
    failed = failures(attempt)
    return bool(failed) and failed[root_cause(failed)].is_lost_peer


def first_of(attempt: Attempt) -> tuple[int, str]:
    """Return the local rank of the first failed worker, and a phrase to follow its name in a message."""
    failed = failures(attempt)
    failure = failed[root_cause(failed)]
    return failure.local_rank, told_here(attempt, failure)


def told_here(attempt: Attempt, failure: ProcessFailure) -> str:
    """Return the phrase of :func:`.how_it_failed`. If all workers ran on this node, add the diagnosis."""
    told = how_it_failed(failure)
    # After an exceeded time limit, do not add the diagnosis, because the phrase contains it already.
    return told if attempt.diagnosis is None or attempt.expired else f"{told}; {attempt.diagnosis.summary}"


def _failure(attempt: Attempt, worker: _core.WorkerExited, unread: str = "") -> ProcessFailure:
    rank = worker.local_rank
    paths = attempt.paths
    # If the OOM killer has killed the nursery, the workers died with it.
    killed = (-signal.SIGKILL, None) if attempt.is_nursery_oom else (worker.exitcode, worker.sent_signal)
    oom = *killed, attempt.oom_kills, attempt.oom_kills_after
    timer = attempt.expired.get(rank)
    failure = failure_of(
        worker,
        *(paths.stdouts.get(rank), paths.stderrs.get(rank), paths.error_files.get(rank, "")),
        # Report the hang or exception for which the agent killed the worker, not the signal that it sent.
        seen_ns=attempt.ended_ns(worker),
        sent_signal=worker.sent_signal if timer is None else None,
        cause=why_it_failed(attempt, rank),
        how=how_by_evidence(attempt, rank),
        note=oom_note(*oom) if killed[1] is None else None,
        unread=unread,
    )
    if unread:
        failure.more_notes = [unread]
    raised = attempt.raised.get(rank)
    # Use the worker's own report to the agent, because the error file may be unreadable, or lack this.
    if raised is not None and raised.origin == "peer" and raised.pid in (worker.pid, failure.recorded_pid):
        failure.is_lost_peer = True
    if timer is not None and failure.error_file != NOT_AVAILABLE:
        # Add a note about the time limit, because the error file mentions only the signal that followed.
        failure.note = why_expired(attempt, rank)
    if failure.how is None and attempt.nursery_end is None and probably_oom(*oom):
        failure.how = f"{how_it_failed(failure)} ({BY_OOM_KILLER})"
    _add_hang(attempt, worker, failure, is_read=not unread)
    return failure


def _add_hang(
    attempt: Attempt, worker: _core.WorkerExited, failure: ProcessFailure, *, is_read: bool
) -> None:
    rank, blame, diagnosis = worker.local_rank, attempt.blame, attempt.diagnosis
    is_first, overdue = worker.local_rank == attempt.first_failure, attempt.expired.get(rank)
    if overdue is not None:
        from elasticrs._engine.supervise import hang_diagnosis

        hung = overdue.hung
        # A worker that has exited early has no stack. Show where the worker was that hung.
        shown = rank if hung is None or overdue.seen_ns == hung.seen_ns else hung.local_rank
        error_file = attempt.paths.error_files.get(shown)
        if is_read and error_file and os.path.isfile(path := hang_file(error_file)):
            failure.stack = hang_diagnosis.stack(path, others=3 if overdue.raised is not None else 0)
            if (shown != rank or attempt.is_undecided) and failure.stack is not None:
                name = attempt.who(shown)
                failure.stack = failure.stack.replace("where it was", f"where {name} was", 1)
            failure.log_paths["hang"] = path
        if blame is not None and attempt.is_undecided and diagnosis is not None:
            failure.stack = hang_diagnosis.stacks_of(diagnosis, blame.ranks) or failure.stack
    if is_first and diagnosis is not None and not attempt.expired:
        failure.more_notes = [diagnosis.summary]
    if is_first or (attempt.first_failure is None and overdue is not None):
        failure.more_notes = [*failure.more_notes, *last_heartbeats(attempt, failure.seen_ns)]
    if blame is not None and is_first and (len(blame.ranks) > 1 or attempt.is_undecided):
        places = {each: place for place, each in attempt.global_ranks().items()}
        local_ranks = phrases.ranges_text(sorted(places[each] for each in blame.ranks))
        ranks = blame.text.removeprefix("ranks ").removeprefix("rank ")
        failure.named = f"{ranks} (local_rank: {local_ranks})"


def last_heartbeats(attempt: Attempt, end_ns: int | None, where: str = "") -> list[str]:
    if not attempt.heartbeats:
        return []
    from elasticrs._engine.supervise import hang_diagnosis

    end_ns = attempt.stamps.get("failure_seen", end_ns or attempt.stamps.get("ended", 0))
    left = attempt.left_before(end_ns)
    notes = hang_diagnosis.heartbeat_notes(attempt.heartbeats, end_ns, attempt.global_ranks(), left)
    return [f"{where}{note}" for note in notes]


# --- the first failure of this node, for the other nodes and the restart policy ---


class Place(Value):
    """Name, host and rank of this node in a round. ``clock`` gives the time of the nodes' store."""

    node: str
    host: str
    group_rank: int
    clock: Clock = Clock()

    def cause(self, time_ns: int, **known: Any) -> Cause:
        here: dict[str, Any] = {"node": self.node, "host": self.host, "group_rank": self.group_rank}
        return Cause(**here, time_ns=time_ns, error_ns=self.clock.error_ns, **known)


def first_word(attempt: Attempt, local_rank: int, place: Place) -> Cause:
    """Describe the first failure without reading any file, so that it can be reported immediately."""
    seen, why = seen_failure(attempt, local_rank), why_expired(attempt, local_rank)
    raised = attempt.raised.get(local_rank)
    message = why or (raised.text if raised is not None else "")
    return place.cause(
        place.clock.from_monotonic(seen.seen_ns or 0),
        exitcode=seen.exitcode,
        message=shortened(message, MAX_MESSAGE) or None,
        is_consequence=(why is None and seen.is_lost_peer) or None,
        **_about(attempt, attempt.global_ranks()[local_rank], seen),
    )


def _about(attempt: Attempt, rank: int, failure: ProcessFailure) -> dict[str, Any]:
    return {
        "round": attempt.round,
        "rank": rank,
        "local_rank": failure.local_rank,
        "pid": failure.pid,
        "how": how_it_failed(failure)[: phrases.MAX_HOW],
        **_hang(attempt, failure.local_rank),
    }


def own_cause(
    attempt: Attempt,
    place: Place,
    told: Cause | None = None,
    *,
    fatal_exit_codes: Collection[int] = (),
) -> Cause | None:
    """Describe the first failure on this node in full; ``None`` if workers were stopped but none failed.
    Workers that were killed because the nursery (the process that starts the workers) exited count as failed.
    ``told`` is the earlier, shorter report from :func:`first_word`. The time of the failure here is never
    later than the time there, even if the estimate of the store's clock has changed since then.
    """
    failed = failures(attempt)
    if not failed:
        return None if attempt.nursery_end is None else not_started(attempt.nursery_end, place)
    rank = root_cause(failed)
    first = failed[rank]
    stopped = victims(failed)
    permanent = _permanence(attempt, failed, stopped, fatal_exit_codes)
    # A worker that this agent has signalled was stopped and has not failed, unless the nursery (the process
    # that starts the workers) exited, which kills the workers.
    if rank in stopped and attempt.nursery_end is None and not permanent:
        return None
    is_consequence = first.is_lost_peer
    at = failed_ns(first)
    time_ns = place.clock.from_monotonic(at if at is not None else time.monotonic_ns())
    if told is not None and told.time_ns is not None:
        time_ns = min(time_ns, told.time_ns)
    return place.cause(
        time_ns,
        # If the agent signalled the worker while it exited after an exception, omit the exit code, because it
        # only tells of the signal.
        exitcode=None if first.recorded_ns is not None and first.sent_signal is not None else first.exitcode,
        message=shortened(_message(attempt, first), MAX_MESSAGE),
        lines=[_end(line, MAX_LINE) for line in first.stderr_tail[-MAX_LINES:]],
        xids=tuple(xid.note() for xid in attempt.xids.values())[:MAX_XIDS],
        exception=first.exception,
        # An error that only reports a lost peer has no place in this worker's program as its cause.
        place=None if is_consequence else _place(attempt, first),
        is_consequence=is_consequence or None,
        is_transient=first.is_transient or None,
        was_killed=first.sent_signal is not None or None,
        ran=_ran(attempt, first),
        **_about(attempt, rank, first),
        **_reached(attempt),
        **permanent,
    )


def facts(attempt: Attempt, local_rank: int, fatal_exit_codes: Collection[int]) -> dict[str, Any]:
    """Return the fields of a :class:`Cause` about a worker, for the restart policy."""
    failed = {rank: each for rank, each in failures(attempt).items() if each.local_rank == local_rank}
    permanent = _permanence(attempt, failed, (), fatal_exit_codes)
    names = ("exception", "place", "is_transient")
    known = {name: getattr(each, name) or None for each in failed.values() for name in names}
    return {**known, **permanent, **_reached(attempt)}


def evidence(attempt: Attempt, fatal_exit_codes: Collection[int]) -> Evidence:
    """Return the restart policy's input after a failed attempt on a single node."""
    node = os.uname().nodename
    cause = own_cause(attempt, Place(node, node, 0), fatal_exit_codes=fatal_exit_codes)
    now = time.monotonic_ns()
    started = attempt.stamps.get("started")
    return Evidence(
        () if cause is None else (cause,),
        now=now / 1e9,
        ran=None if started is None else (attempt.stamps.get("failure_seen", now) - started) / 1e9,
        jitter=int.from_bytes(os.urandom(2), "big") / 0xFFFF,
    )


def _reached(attempt: Attempt) -> dict[str, Any]:
    """Return the highest training step of any worker, and whether all workers go on counting steps after a
    restart. Workers that use ``elasticrs.Keep`` do.
    """
    kept = None if attempt.keep_files is None else attempt.keep_files.standing()
    if kept is not None and isinstance(step := kept["ended_step"], int):
        return {"reached": step, "is_global": True}
    found = [(beat.step, beat.is_global) for beat in attempt.heartbeats if beat.step is not None]
    if not found:
        return {}
    return {"reached": max(step for step, _ in found), "is_global": all(each for _, each in found) or None}


def _place(attempt: Attempt, failure: ProcessFailure) -> str | None:
    frame = _hang(attempt, failure.local_rank).get("frame")
    if frame is None:
        return failure.place
    from elasticrs._engine.supervise import hang_diagnosis

    return hang_diagnosis.place(frame)


def _ran(attempt: Attempt, failure: ProcessFailure) -> float | None:
    """Return the seconds that a worker ran until its failure or, if it hung, its last progress, if known."""
    overdue, started_ns = attempt.expired.get(failure.local_rank), attempt.stamps.get("started")
    hung = None if overdue is None else overdue.hung
    end_ns = failed_ns(failure) if hung is None else hung.since_ns
    if started_ns is None or end_ns is None:
        return None
    return round(max(0, end_ns - started_ns) / 1e9, 3)


def _permanence(
    attempt: Attempt,
    failed: Mapping[int, ProcessFailure],
    stopped: Collection[int],
    fatal_exit_codes: Collection[int],
) -> dict[str, Any]:
    """Return fields that say why another attempt would fail in the same way; empty if it may succeed."""
    own = {rank: failure for rank, failure in failed.items() if rank not in stopped}
    marked = [rank for rank, failure in failed.items() if not failure.is_retryable]
    fatal = [rank for rank, failure in own.items() if failure.exitcode in fatal_exit_codes]
    # An import that fails late in the run may fail for a temporary reason, such as a file system error.
    early = not attempt.heartbeats and all(
        failure.is_start_error and (_ran(attempt, failure) or 0) < STEADY for failure in own.values()
    )
    for kind, ranks in (
        (Permanence.NON_RETRYABLE, marked),
        (Permanence.EXIT_CODE, fatal),
        (Permanence.START_ERROR, own if early else ()),
    ):
        for rank in ranks:
            sign = failed[rank]
            what = f"exit code {sign.exitcode}"
            if sign.exception is not None and kind is not Permanence.EXIT_CODE:
                what = sign.exception.removeprefix("builtins.") + (f" at {sign.place}" if sign.place else "")
            return {"permanence": kind.value, "permanent_rank": rank, "permanent_sign": what}
    return {}


def _hang(attempt: Attempt, local_rank: int) -> dict[str, Any]:
    """Return the fields of a :class:`Cause` about a worker's hang, by which the nodes find whom to blame."""
    overdue = attempt.expired.get(local_rank)
    event = overdue.hung if overdue is not None else None
    if event is None:
        return {}
    told: dict[str, Any] = {
        "ground": event.ground,
        "silence": round((event.seen_ns - event.since_ns) / 1e9, 3),
    }
    own = next((rank for rank in event.ranks if rank.local_rank == local_rank), None)
    if own is not None and own.frame:
        told["frame"] = own.frame
    if event.missed == "startup":
        told["step"] = BEFORE_ALL_STEPS
    elif own is not None and own.heartbeat is not None and own.heartbeat.step is not None:
        told["step"] = own.heartbeat.step
    return told


def _message(attempt: Attempt, first: ProcessFailure) -> str:
    text = traceback_text(first)
    if first.member is not None and not _is_same(text, first.member):
        text = first.member
    why = why_expired(attempt, first.local_rank)
    if why is None:
        # The worker has exceeded no time limit, so the only possible note is the one about the OOM killer.
        return f"{text}\n{first.note}" if first.note else text
    return f"{text.removeprefix(why).strip()}\n{why}".strip()


def _is_same(text: str, member: str) -> bool:
    found, told = summarize(text), summarize(member)
    return (found and (found.said, found.place)) == (told and (told.said, told.place))


def not_started(message: str, place: Place) -> Cause:
    return place.cause(place.clock.from_monotonic(time.monotonic_ns()), message=message[:MAX_MESSAGE])


def no_program(message: str, place: Place) -> Cause:
    cause = not_started(message, place)
    return cause.replaced(permanence=Permanence.START_ERROR.value, permanent_sign=message[:MAX_LINE])


def _end(text: str, limit: int) -> str:
    return text if len(text) <= limit else "…" + text[-limit + 1 :]
