"""Determines which worker failed first, as :func:`.root_cause` does, but only from the agent's events.

No file is read, because a slow file system would delay the stop of the workers and the report to other nodes.
"""

from __future__ import annotations

import signal

from elasticrs._engine.job import phrases
from elasticrs._engine.job.failure_cause import summarize

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticrs._core import WorkerHung
    from elasticrs._engine.failures.failure import ProcessFailure
    from elasticrs._engine.supervise.attempts.attempt import Attempt


def early_leavers(
    attempt: Attempt, reports_lost_peer: Callable[[Attempt], bool] | None = None
) -> tuple[int, ...]:
    """Return the ranks that exited with code 0 before the first failure, if that failure only reports a lost
    peer. The lost peer is then one of these ranks. Return no ranks if the job has workers on other nodes, or
    if the workers are members of a rendezvous. Return none either if most workers have exited with code 0:
    the failed one may then have run more steps.

    After the attempt, ``reports_lost_peer`` decides about the first failure from the workers' files. It is
    called only if the exception of that worker is unknown, for example because the worker exited at once.
    """
    left = attempt.leavers()
    return left if left and _is_lost_peer_first(attempt, reports_lost_peer) else ()


def _is_lost_peer_first(attempt: Attempt, reports_lost_peer: Callable[[Attempt], bool] | None) -> bool:
    """Return true if a rank that exited with code 0 may have caused the first failure."""
    if attempt.blame is not None:
        return attempt.blame.basis == "exit" and attempt.blame.is_decided
    if attempt.first_failure is None:
        return False
    failure = attempt.raised.get(attempt.first_failure)
    if failure is None:
        return reports_lost_peer is not None and reports_lost_peer(attempt)
    return failure.origin == "peer"


def first_seen(attempt: Attempt) -> int:
    """Return the local rank of the worker that failed first. Its peers may have exited before it: after an
    exception, a worker closes its connections before it exits, and that may make its peers fail.
    """
    first = attempt.first_failure
    assert first is not None
    if not attempt.raised.keys() - {first} or first in attempt.expired:
        return first
    from elasticrs._engine.failures.failure import root_cause

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
    from elasticrs._engine.failures.failure import ProcessFailure

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
    """Describe the time limit because of which the agent killed this worker; ``None`` if there is none."""
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
        from elasticrs._engine.supervise.failures.hang_diagnosis import why_blamed

        return why_blamed(attempt, event, local_rank)
    # An error in the code that writes this text must not end the job without a report.
    except Exception as error:
        from elasticrs._engine.hangs.diagnose import failed

        return f"{'failed' if event.hung is None else 'hung'}; {failed(error).summary}"


def why_it_failed(attempt: Attempt, local_rank: int) -> str | None:
    """Return why a worker failed, if that is known, but neither its exit code nor an exception shows it."""
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
    """Return :func:`why_it_failed` as a phrase; ``None`` if the exit code or the exception says more."""
    why = why_it_failed(attempt, local_rank)
    # If the worker was merely slow to exit, do not report the time limit that it exceeded.
    if why is None or attempt.is_slow_to_exit(local_rank):
        return None
    return f" {why}" if why == phrases.SILENT else f": {why}"


def _how_it_hung(attempt: Attempt, event: WorkerHung) -> str:
    if attempt.blame is not None and attempt.is_undecided:
        left = phrases.ranks_text(attempt.left_before(event.seen_ns))
        is_exit = attempt.blame.basis == "exit"
        return f": {left} exited with code 0, then others hung" if is_exit else ": a rank hangs"
    if attempt.blame is not None and attempt.blame.basis == "records":
        return f" {'keeps' if len(attempt.blame.ranks) == 1 else 'keep'} the other ranks waiting"
    # If several ranks are silent and there are no flight records, it is only known which rank stopped first.
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
    # If a signal from others killed a worker while it exited after an exception, name the signal.
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

    - The ranks to blame exited with code 0 while other ranks still waited for them.
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
