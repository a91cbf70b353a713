"""Determines which worker failed first, as :mod:`.root_cause` does, from the supervisor's events alone.

No file is read, because a slow file system would delay the stop of the workers and the report to other nodes.
"""

from __future__ import annotations

import os
import signal
import stat

from elasticrs._engine.failures.files import (
    flight_dumps,
    flight_record_file,
    flight_requests_file,
    last_record_file,
)
from elasticrs._engine.job import phrases
from elasticrs._engine.job.traceback_summary import summarize

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
    peer. The lost peer is then one of these ranks.

    Return no ranks if the job has workers on other nodes, or if the workers are members of a rendezvous.
    Return none either if most workers have exited with code 0: the failed one may then have run more steps.

    After the attempt, ``reports_lost_peer`` decides about the first failure from the workers' files. It is
    called only if the exception of that worker is unknown, for example because the worker exited at once.
    """
    ranks = attempt.global_ranks()
    if attempt.plan.page is not None or len(ranks) != attempt.world_size:
        return ()
    left = [
        ranks[local_rank]
        for local_rank, exited in attempt.exits.items()
        if exited.exitcode == 0 and exited.sent_signal is None
    ]
    if not left or 2 * len(left) > len(ranks) or not _is_lost_peer_first(attempt, reports_lost_peer):
        return ()
    return tuple(sorted(left))


def _is_lost_peer_first(attempt: Attempt, reports_lost_peer: Callable[[Attempt], bool] | None) -> bool:
    """Return true if a rank that exited with code 0 may have caused the first failure."""
    if attempt.blame is not None:
        return attempt.blame.basis == "exit"
    if attempt.first_failure is None:
        return False
    failure = attempt.raised.get(attempt.first_failure)
    if failure is None:
        return reports_lost_peer is not None and reports_lost_peer(attempt)
    return failure.origin == "peer"


def first_seen(attempt: Attempt) -> int:
    """Return the local rank of the worker that failed first.

    It may not have exited first. A worker that has raised an exception closes its connections, which may
    cause its peers to fail and exit before it has exited itself.
    """
    first = attempt.first_failure
    assert first is not None
    if not attempt.raised.keys() - {first} or first in attempt.expired:
        return first
    from elasticrs._engine.failures.root_cause import root_cause

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


def why_it_failed(attempt: Attempt, local_rank: int) -> str | None:
    """Return why a worker failed, if that is known, but neither its exit code nor an exception shows it."""
    worker = attempt.exits.get(local_rank)
    if local_rank in attempt.expired:
        return attempt.why_expired(local_rank)
    if worker is not None and attempt.nursery_exitcode is not None:
        how = phrases.how_the_nursery_ended(attempt.nursery_exitcode, attempt.nursery_hung)
        return f"the nursery {how}, which killed the worker"
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
    if attempt.blame is not None and not attempt.blame.is_decided:
        return ": a rank hangs"
    if attempt.blame is not None and attempt.blame.basis == "records":
        return f" {'keeps' if len(attempt.blame.ranks) == 1 else 'keep'} the other ranks waiting"
    # If several ranks are silent and there are no flight records, it is only known which rank stopped first.
    is_alone = sum(seen.is_late for seen in event.ranks) < 2
    return " has hung" if is_alone or event.ground == "stopped" else " stopped first"


def how_it_was_seen(attempt: Attempt, local_rank: int) -> str:
    """Return a phrase to append to the worker's name, such as `` raised KeyError`` or `` died by SIGKILL``.

    The phrase omits the text of the exception, because the line about the restart, or the report, contains
    it.
    """
    raised, worker = attempt.raised.get(local_rank), attempt.exits.get(local_rank)
    overdue = attempt.expired.get(local_rank)
    if overdue is not None and overdue.hung is not None:
        return _how_it_hung(attempt, overdue.hung)
    if overdue is not None and overdue.timer is not None:
        return " has hung"
    if (
        overdue is not None
        and overdue.is_blamed
        and attempt.blame is not None
        and not attempt.blame.is_decided
    ):
        return f": {attempt.who(local_rank)} {attempt.why_expired(local_rank)}"
    if overdue is not None and overdue.is_blamed:
        return f" {attempt.why_expired(local_rank)}"
    # If the worker was killed while it exited after an exception, it died of the signal, not of the
    # exception.
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


# --- flight records ---


def request_records(attempt: Attempt) -> list[str]:
    """Request a flight record (a file in which torch records collectives) from each worker that can write
    one. Return the paths of these files. Never blocks.
    """
    paths = attempt.paths.error_files.values()
    return [flight_record_file(path) for path in paths if path and _is_requested(path)]


def _is_requested(error_file: str) -> bool:
    record, requests = flight_record_file(error_file), flight_requests_file(error_file)
    try:
        if os.path.lexists(record):
            os.unlink(record)  # Delete the record of an earlier hang, from which the worker has recovered.
        descriptor = os.open(requests, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False  # The worker has no thread that answers requests.

    # Opening the FIFO for writing requests a record. The worker reads until EOF, and then writes the record.
    os.close(descriptor)
    return True


def record_files(attempt: Attempt, local_rank: int, since: float = 0.0) -> list[str]:
    """Return the files in which torch has recorded a worker's collectives (flight records): first the
    requested one, then the one that the worker wrote at its end, then the one of NCCL's watchdog.

    Files that were last modified before ``since`` (seconds of the wall clock) are left out.
    """
    error_file = attempt.paths.error_files.get(local_rank)
    if not error_file:
        return []
    rank = attempt.plan.ranks[local_rank].global_rank
    dump = f"{flight_dumps(error_file)}{rank}"
    paths = flight_record_file(error_file), last_record_file(error_file), dump
    return [path for path in paths if _is_file(path, since)]


def _is_file(path: str, since: float) -> bool:
    try:
        found = os.lstat(path)
        return stat.S_ISREG(found.st_mode) and found.st_mtime >= since
    except OSError:
        return False  # The file does not exist or cannot be accessed.


def has_records(attempt: Attempt) -> bool:
    return any(record_files(attempt, local_rank) for local_rank in attempt.global_ranks())


def is_collective_failure(attempt: Attempt) -> bool:
    """Return true if another rank may have caused the first failure, because it made a collective fail. That
    is so in these cases:

    - The ranks to blame exited with code 0 while other ranks still waited for them.
    - No time limit expired, and the first failure is an exception that reports a lost or silent peer.
    - No time limit expired, the worker raised no exception, and a worker died by SIGABRT. gloo and NCCL's
      watchdog end their process in this way.
    """
    if attempt.blame is not None and attempt.blame.basis == "exit":
        return True
    if attempt.first_failure is None or attempt.first_failure in attempt.expired:
        return False
    raised = attempt.raised.get(first_seen(attempt))
    return aborted(attempt) is not None if raised is None else raised.origin == "peer"


def aborted(attempt: Attempt) -> int | None:
    """Return the local rank of the first worker that died by SIGABRT without a signal from elasticrs.

    It need not be the first worker that exited. The kernel closes a worker's connections before it reports
    the exit, so workers that lose a connection may exit earlier.
    """
    for local_rank, exited in attempt.exits.items():
        if exited.exitcode == -signal.SIGABRT and exited.sent_signal is None:
            return local_rank
    return None
