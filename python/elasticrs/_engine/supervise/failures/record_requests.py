"""Requests flight records from this node's running workers, and finds the records that the workers have
written. After a failure, the core requests the records instead.
"""

from __future__ import annotations

import os
import stat

from elasticrs._engine.workers.logs import flight_dumps, flight_record_file, flight_requests_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs._engine.supervise.attempts.attempt import Attempt

_SIGABRT = 6


def request_records(attempt: Attempt) -> list[str]:
    """Request a flight record from each worker that has a thread for writing it. Never blocks.

    Return the paths of the files to which these workers write their records.
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
    """Return the paths of a worker's existing flight records: the requested record first, then NCCL's dump.

    Args:
        attempt: attempt of the worker.
        local_rank: local rank of the worker.
        since: earliest modification time of a record, in seconds of the wall clock. Older records are
            omitted.
    """
    error_file = attempt.paths.error_files.get(local_rank)
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
        return False  # The file does not exist or cannot be accessed.


def has_records(attempt: Attempt) -> bool:
    """Return true if at least one worker of this node has written a flight record."""
    return any(record_files(attempt, local_rank) for local_rank in attempt.global_ranks())


def is_collective_failure(attempt: Attempt) -> bool:
    """Return true if another rank may have caused the first failure by making a collective fail.

    Return true if one of these conditions holds:

    - The ranks to blame are ranks that exited with code 0 while other ranks still waited for them.
    - The worker that failed first has raised an exception that reports a lost or silent peer.
    - That worker has raised no exception, and a worker died by SIGABRT. gloo and NCCL's watchdog end their
      process in this way.

    The last two conditions do not apply if the first failure is an expired time limit.
    """
    from elasticrs._engine.supervise.failures.first_failure import first_seen

    if attempt.blame is not None and attempt.blame.basis == "exit":
        return True
    if attempt.first_failure is None or attempt.first_failure in attempt.expired:
        return False
    raised = attempt.raised.get(first_seen(attempt))
    return aborted(attempt) is not None if raised is None else raised.origin == "peer"


def aborted(attempt: Attempt) -> int | None:
    """Return the local rank of the first worker that died by SIGABRT without a signal from elasticrs.
    ``None`` if there is none.

    Other workers may have exited before this worker, because the kernel closes the connections of a process
    before it reports the process's exit.
    """
    for local_rank, exited in attempt.exits.items():
        if exited.exitcode == -_SIGABRT and exited.sent_signal is None:
            return local_rank
    return None
