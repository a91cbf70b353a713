"""Requests the flight records of this node's workers, after a collective has failed in one of them.

A worker that reports a lost or silent peer is still exiting when the agent gets its notice. Until it has
exited, the other workers are not signalled, so most of them can still write their records. Nothing waits for
the records.
"""

from __future__ import annotations

import os
import stat

from elasticrs.workers.logs import flight_dumps, flight_record_file, flight_requests_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.agent.attempt import Attempt

_SIGABRT = 6


def request_records(attempt: Attempt) -> list[str]:
    """Request the flight records of all workers that have a thread for that. Never blocks.

    Return the paths of the files that these workers write.
    """
    paths = attempt.paths.error_files.values() if attempt.paths is not None else ()
    return [flight_record_file(path) for path in paths if path and _is_requested(path)]


def request_after_lost_peer(attempt: Attempt, text: str) -> None:
    """Request the flight records of all workers if a worker's exception only reports a lost or silent peer.
    Do so only once for each attempt.
    """
    from elasticrs.multiprocessing.errors.root_cause import reports_lost_peer

    if not attempt.has_requested_records and reports_lost_peer(text):
        attempt.has_requested_records = True
        request_records(attempt)


def _is_requested(error_file: str) -> bool:
    record, requests = flight_record_file(error_file), flight_requests_file(error_file)
    try:
        if os.path.lexists(record):
            os.unlink(record)  # It is about a hang from which the worker has recovered.
        descriptor = os.open(requests, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False  # No thread of the worker waits for requests.
    # The thread continues when the FIFO is closed again.
    os.close(descriptor)
    return True


def record_files(attempt: Attempt, local_rank: int, since: float = 0.0) -> list[str]:
    """Return the paths of a worker's flight records that exist: the requested one and NCCL's dump.

    Args:
        attempt: attempt of the worker.
        local_rank: local rank of the worker.
        since: time of the oldest record, on the wall clock in seconds.
    """
    error_file = attempt.paths.error_files.get(local_rank) if attempt.paths is not None else None
    if not error_file:
        return []
    rank = attempt.plan.ranks[local_rank].global_rank
    paths = flight_record_file(error_file), f"{flight_dumps(error_file)}{rank}"
    return [path for path in paths if _is_file(path, since)]


def _is_file(path: str, since: float) -> bool:
    try:
        found = os.lstat(path)
        return stat.S_ISREG(found.st_mode) and found.st_mtime >= since
    except OSError:
        return False  # The file does not exist.


def has_records(attempt: Attempt) -> bool:
    """Return true if at least one worker of this node has written a flight record."""
    return any(record_files(attempt, local_rank) for local_rank in attempt.global_ranks())


def is_collective_failure(attempt: Attempt) -> bool:
    """Return true if the first failure may be a collective that has failed because of another rank: an
    exception that only reports a lost or silent peer, or the end of the process by NCCL's watchdog.
    """
    from elasticrs.agent.first_failure import first_seen
    from elasticrs.multiprocessing.errors.root_cause import reports_lost_peer

    if attempt.first_failure is None or attempt.first_failure in attempt.expired:
        return False
    first = first_seen(attempt)
    raised, exited = attempt.raised.get(first), attempt.exits.get(first)
    if raised is not None:
        return reports_lost_peer(raised.text)
    return exited is not None and exited.exitcode == -_SIGABRT
