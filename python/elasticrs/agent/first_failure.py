"""Determines which worker failed first in an attempt, from the supervisor's events alone.

No file is read, because a slow file system would delay the stop of the other workers and the report to the
other nodes. The final report applies the same rule (:mod:`elasticrs.multiprocessing.errors.root_cause`), but
also reads the error files.
"""

from __future__ import annotations

from elasticrs.job.value import Value
from elasticrs.report.traceback_summary import summarize

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.agent.attempt import Attempt

_SIGTERM = 15


class _Seen(Value):
    """The fields of ``ProcessFailure`` that determine the root cause."""

    pid: int
    seen_ns: int
    sent_signal: int | None
    recorded_ns: int | None
    recorded_pid: int | None
    message: str
    cause: str | None = None
    timestamp: int = 0
    is_first: bool = False


def first_seen(attempt: Attempt) -> int:
    """Return the local rank of the worker that failed first.

    This is not always the worker that exited first. A worker that has raised an exception closes its
    connections, which may cause its peers to fail and exit before it has exited itself.

    Args:
        attempt: attempt in which a failure has been seen.
    """
    first = attempt.first_failure
    assert first is not None
    if not attempt.raised.keys() - {first} or first in attempt.expired:
        return first
    from elasticrs.multiprocessing.errors.root_cause import root_cause

    exited = attempt.exits[first]
    seen = {}
    for local_rank in sorted({first, *attempt.raised}):
        raised = attempt.raised.get(local_rank)
        seen[local_rank] = _Seen(
            raised.pid if raised is not None else exited.pid,
            exited.seen_ns,
            # Treat the other workers as signalled, because the agent is already stopping them.
            None if local_rank == first else _SIGTERM,
            None if raised is None else raised.seen_ns,
            None if raised is None else raised.pid,
            "" if raised is None else raised.text,
        )
    return root_cause(seen)  # type: ignore[arg-type]  # `_Seen` has all fields that `root_cause` reads


def how_it_failed(attempt: Attempt, local_rank: int) -> str:
    """Return a phrase that says how a worker failed, to append to its name. Examples are `` raised KeyError``
    and `` died by SIGKILL``. The text of an exception follows in the line about the restart or in the report.
    """
    raised, worker = attempt.raised.get(local_rank), attempt.exits.get(local_rank)
    overdue = attempt.expired.get(local_rank)
    if overdue is not None and overdue.raised is None:
        return " has hung"
    # If the worker was killed during its exit, report the signal, which says more than the exception.
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
