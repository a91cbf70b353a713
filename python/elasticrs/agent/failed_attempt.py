"""From an attempt that failed to torch's ``ProcessFailure`` and its report.

Imported only when something went wrong.
"""

from __future__ import annotations

import os

from elasticrs import texts
from elasticrs.agent.evidence import oom_note, probably_oom
from elasticrs.console import prefix_of
from elasticrs.logs import hang_file
from elasticrs.multiprocessing.errors import ChildFailedError, ProcessFailure
from elasticrs.multiprocessing.errors.failure import NOT_AVAILABLE
from elasticrs.multiprocessing.errors.report import traceback_text
from elasticrs.multiprocessing.errors.root_cause import root_cause, victims
from elasticrs.multiprocessing.failed_process import failure_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticrs import _core
    from elasticrs.agent.attempt import Attempt, JobResult
    from elasticrs.config import JobConfig

_MAX_RESTARTS = 3
"""So many are told of in the report."""


def failures(attempt: Attempt) -> dict[int, ProcessFailure]:
    """Return what is known of every worker that did not exit with 0, by global rank, the first one first."""
    ranks = attempt.global_ranks()
    return {ranks[worker.local_rank]: _failure(attempt, worker) for worker in attempt.failed_exits()}


def first_of(attempt: Attempt) -> str:
    """Say in one line which worker of an attempt failed first, and why."""
    failed = failures(attempt)
    rank = root_cause(failed)
    failure = failed[rank]
    who = attempt.who(failure.local_rank, failure.pid)
    worker = attempt.exits[failure.local_rank]
    why = attempt.why_expired(failure.local_rank)
    if why is not None:
        return f"{who}: {why}"
    # Of a rank that raised, and that we stopped before it had ended, the exception is the reason.
    ended_by_itself = worker.sent_signal is None and bool(failure.signal_number())
    if failure.error_file != NOT_AVAILABLE and not ended_by_itself:
        from elasticrs.headline import headline

        return f"{who}: {headline(traceback_text(failure)) or attempt.how_it_ended(worker)}"
    is_oom = probably_oom(worker.exitcode, worker.sent_signal, attempt.oom_kills, attempt.oom_kills_after)
    oom = " (probably by the kernel's OOM killer)" if is_oom else ""
    return f"{who} {attempt.how_it_ended(worker)}{oom}"


def all_failures(result: JobResult) -> dict[int, ProcessFailure]:
    """Return the failures of this node in the last attempt, and the first of the whole job if that was
    elsewhere.
    """
    failed = failures(result.attempts[-1]) if result.attempts else {}
    cause = result.first_cause
    if cause is not None and failed and cause.round not in (None, result.attempts[-1].round):
        # This node had no part in the round that ended the job: what failed here was made good.
        failed = {}
    if cause is None and result.message is not None and len(victims(failed)) == len(failed):
        # The message is the reason; workers that we stopped for it are no failures.
        return {}
    if cause is None or cause.rank is None:
        return failed
    rank = cause.rank
    if rank in failed and cause.pid not in (None, failed[rank].pid):
        # Of workers that are members of a rendezvous, two may have had a rank, one after the other.
        other = failed.pop(rank)
        failed[-1 - other.local_rank] = other
    if rank not in failed:
        from elasticrs.agent.cause import remote_failure

        remote = remote_failure(cause, result.clock)
        if result.attempts and all(failure.sent_signal is not None for failure in failed.values()):
            remote.more_notes = _last_heartbeats(result.attempts[-1], remote.seen_ns, "here: ")
        failed = {rank: remote, **failed}
    failed[rank].is_first = True
    if result.attempts and cause.ground is not None:
        note = f"it may have waited for rank {rank}, which hung first, judged over all nodes"
        global_ranks = result.attempts[-1].global_ranks()
        for late in (global_ranks[local_rank] for local_rank in result.attempts[-1].expired):
            if late != rank and late in failed:
                failed[late].more_notes = [note, *failed[late].more_notes]
    return failed


def child_failed_error(job: JobConfig, result: JobResult) -> ChildFailedError | None:
    """Return the error of a failed job; ``None`` when no worker failed (none could be started)."""
    failed = all_failures(result)
    if not failed:
        return None
    root = failed[root_cause(failed)]
    restarts = [each for each in result.attempts if each.phases][-_MAX_RESTARTS:]
    began = (f"attempt {each.name} was running {each.how_it_began()}" for each in restarts)
    root.more_notes = [*root.more_notes, *began]
    return ChildFailedError(job.name, failed)


def print_report(job: JobConfig, result: JobResult, write: Callable[[str], None]) -> None:
    """Write the report, and the root cause's error file to the launcher's own, if it has one."""
    error = child_failed_error(job, result)
    if result.message is not None:
        write(prefix_of(job.rendezvous is not None) + result.message + os.linesep)
    if error is None:
        return
    write(error.format_msg() + os.linesep)
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        hand_on(error)


def hand_on(error: ChildFailedError) -> None:
    """Copy the error file of the root cause to where the launcher's own parent looks for it."""
    from elasticrs.multiprocessing.errors import get_error_handler

    _, first = error.get_first_failure()
    if os.path.isfile(first.error_file):
        get_error_handler().dump_error_file(first.error_file, first.exitcode or 0)


def _failure(attempt: Attempt, worker: _core.WorkerExited) -> ProcessFailure:
    rank = worker.local_rank
    paths = attempt.paths
    files = ("", "", "")
    if paths is not None:
        files = (paths.stdouts.get(rank, ""), paths.stderrs.get(rank, ""), paths.error_files.get(rank, ""))
    note = oom_note(worker.exitcode, worker.sent_signal, attempt.oom_kills, attempt.oom_kills_after)
    timer = attempt.expired.get(rank)
    failure = failure_of(
        worker,
        *files,
        # It failed when it had raised, or was found to hang. What ended it then is a consequence.
        seen_ns=attempt.failed_ns(worker),
        sent_signal=worker.sent_signal if timer is None else None,
        cause=_cause(attempt, worker),
        note=note if worker.sent_signal is None else None,
    )
    if timer is not None and failure.error_file != NOT_AVAILABLE:
        # What it said when the signal came is in the message; why it came must be told as well.
        failure.note = attempt.why_expired(rank)
    _add_hang(attempt, worker, failure)
    return failure


def _add_hang(attempt: Attempt, worker: _core.WorkerExited, failure: ProcessFailure) -> None:
    """Where it hung, and the last heartbeats of all."""
    rank = worker.local_rank
    if rank in attempt.expired and attempt.paths is not None and attempt.paths.error_files.get(rank):
        from elasticrs.agent import hangs

        path = hang_file(attempt.paths.error_files[rank])
        if os.path.isfile(path):
            others = 3 if attempt.expired[rank].raised is not None else 0
            failure.stack = hangs.stack(path, others=others)
            failure.log_paths["hang"] = path
    if rank == attempt.first_failure or (attempt.first_failure is None and rank in attempt.expired):
        failure.more_notes = _last_heartbeats(attempt, failure.seen_ns)


def _last_heartbeats(attempt: Attempt, end_ns: int | None, where: str = "") -> list[str]:
    if not attempt.heartbeats:
        return []
    from elasticrs.agent import hangs

    end_ns = attempt.stamps.get("failure_seen", end_ns or attempt.stamps.get("ended", 0))
    notes = hangs.heartbeat_notes(attempt.heartbeats, end_ns, attempt.global_ranks())
    return [f"{where}{note}" for note in notes]


def _cause(attempt: Attempt, worker: _core.WorkerExited) -> str | None:
    if worker.local_rank in attempt.expired:
        return attempt.why_expired(worker.local_rank)
    if attempt.nursery_exitcode is not None:
        how = texts.how_the_nursery_ended(attempt.nursery_exitcode, attempt.nursery_hung)
        return f"the nursery {how}, and the worker with it"
    if worker.local_rank in attempt.silent:
        return texts.SILENT
    if worker.exitcode is None:
        return "the worker is gone, and its exit status is unknown"
    return None
