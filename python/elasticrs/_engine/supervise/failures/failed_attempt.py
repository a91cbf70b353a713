"""Converts a failed attempt into torch's ``ProcessFailure`` objects and into the failure report.

Imported only after a failure.
"""

from __future__ import annotations

import os
from functools import partial

from elasticrs._engine.job import phrases
from elasticrs._engine.job.failure_cause import Verdict
from elasticrs._engine.process.background_call import FILE_LIMIT, FileAccess
from elasticrs._engine.supervise.attempts.evidence import oom_note, probably_oom
from elasticrs._engine.supervise.attempts.state_machine import Phase
from elasticrs._engine.workers.failures.failure import NOT_AVAILABLE, ProcessFailure
from elasticrs._engine.workers.failures.report import format_report, how_it_failed
from elasticrs._engine.workers.failures.root_cause import root_cause, victims
from elasticrs._engine.workers.functions.failed_process import failure_of
from elasticrs._engine.workers.logs import hang_file
from elasticrs.multiprocessing.errors import ChildFailedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elasticrs import _core
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.supervise.attempts.attempt import Attempt, JobResult

_MAX_RESTARTS = 3
"""Maximum number of restarts whose durations are listed in the report."""
_MAX_EARLIER = 8
"""Maximum number of causes of earlier attempts that are listed in the report."""

_UNREAD = f"its error file could not be read within {FILE_LIMIT:g} s"


def failures(attempt: Attempt) -> dict[int, ProcessFailure]:
    """Return a dictionary that maps the global ranks of failed workers to their failures. The first failure
    comes first.
    """
    ranks = attempt.global_ranks()
    exits = attempt.failed_exits()
    read = attempt.files.run(lambda: [_failure(attempt, worker) for worker in exits], None)
    if read is None:
        read = [_failure(attempt, worker, _UNREAD) for worker in exits]
    found = {ranks[worker.local_rank]: failure for worker, failure in zip(exits, read, strict=True)}
    first = next(iter(found.values()), None)
    if first is not None and attempt.blame is not None and attempt.expired[first.local_rank].is_blamed:
        first.is_first = True
    if found and attempt.xids:
        _add_xids(attempt, found)
    return found


def _add_xids(attempt: Attempt, failed: Mapping[int, ProcessFailure]) -> None:
    """Add each Xid (an NVIDIA driver error) to the notes of the failed workers that caused it. If no such
    worker is known, add the Xid to the first failure.
    """
    first = next(iter(failed.values()))
    for xid in reversed(attempt.xids.values()):
        owners = [failure for failure in failed.values() if failure.pid in xid.workers]
        for failure in owners or [first]:
            failure.more_notes = [xid.note(), *failure.more_notes]


def first_of(attempt: Attempt) -> tuple[int, str]:
    """Return the local rank of the worker that failed first in an attempt. Also return a phrase that says how
    it failed, to append to the worker's name.
    """
    failed = failures(attempt)
    failure = failed[root_cause(failed)]
    return failure.local_rank, _how(attempt, failure)


def _how(attempt: Attempt, failure: ProcessFailure) -> str:
    worker = attempt.exits[failure.local_rank]
    why = attempt.why_expired(failure.local_rank)
    # Do not report an exceeded time limit if the worker was merely slow to exit.
    if why is not None and not attempt.is_slow_to_exit(failure.local_rank):
        return f": {why}"
    if worker.local_rank in attempt.silent:
        return f" {phrases.SILENT}"
    is_oom = probably_oom(worker.exitcode, worker.sent_signal, attempt.oom_kills, attempt.oom_kills_after)
    told = how_it_failed(failure) + (" (probably by the kernel's OOM killer)" if is_oom else "")
    # After a hang, omit the diagnosis, because the description of the exceeded time limit already contains
    # it.
    return told if attempt.diagnosis is None or attempt.expired else f"{told}; {attempt.diagnosis.summary}"


def headline_of(result: JobResult, failed: Mapping[int, ProcessFailure]) -> str:
    """Return the root cause of a failed job as one line, such as ``rank 3 of 8: KeyError: 1 (train.py:4)``.

    Args:
        result: result of the job.
        failed: the non-empty result of :func:`all_failures`.
    """
    rank = root_cause(failed)
    failure, cause = failed[rank], result.first_cause
    attempt = result.attempts[-1] if result.attempts else None
    if failure.host is not None and cause is not None:
        from elasticrs._engine.nodes.protocol.announcements import how_it_failed as how_elsewhere

        is_same_round = attempt is not None and cause.round in (None, attempt.round)
        world = f" of {attempt.world_size}" if attempt is not None and is_same_round else ""
        told = f"rank {rank}{world} on node {cause.node}{how_elsewhere(cause.encoded())}"
    else:
        assert attempt is not None
        world = f" of {attempt.world_size}" if attempt.plan.members is None else ""
        who = attempt.who_failed(failure.local_rank, of=world)
        told = who + _how(attempt, failure)
    return told if cause is None or cause.diagnosis is None else f"{told}; {cause.diagnosis}"


def earlier_causes(attempts: Sequence[Attempt]) -> list[str]:
    """Return the reasons why workers were replaced and why all attempts before the last one ended, in order.

    Consecutive equal reasons are merged into one line.
    """
    found: list[tuple[str, list[str]]] = []
    for attempt in attempts:
        replaced = [each.cause for each in attempt.replaced_workers]
        own = [] if attempt is attempts[-1] else [attempt.cause]
        for cause in filter(None, [*replaced, *own]):
            if not found or found[-1][0] != cause:
                found.append((cause, []))
            found[-1][1].append(attempt.name)
    shown = [f"{_named(names)}: {cause}" for cause, names in found[-_MAX_EARLIER:]]
    left_out = len(found) - len(shown)
    return [*([f"{left_out} earlier causes are not shown"] if left_out else []), *shown]


def _named(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"earlier, in attempt {names[0]}"
    times = f"{len(names)} times in a row"
    if names[0] == names[-1]:
        return f"earlier, {times} in attempt {names[0]}"
    return f"earlier, {times} from attempt {names[0]} to {names[-1]}"


def all_failures(result: JobResult) -> dict[int, ProcessFailure]:
    """Return this node's failures in the last attempt, by rank.

    If the job's first failure was on another node, include that failure. Causes of earlier attempts are added
    to the notes of the root cause.
    """
    failed = _last_failures(result)
    if failed:
        _add_history(result, failed)
    return failed


def _last_failures(result: JobResult) -> dict[int, ProcessFailure]:
    failed = failures(result.attempts[-1]) if result.attempts else {}
    cause = result.first_cause
    if cause is not None and failed and cause.round not in (None, result.attempts[-1].round):
        # Omit this node's failures, because the job recovered from them. The job failed in a later rendezvous
        # round, in which this node did not take part.
        failed = {}
    if cause is None and result.message is not None and len(victims(failed)) == len(failed):
        # No worker caused the failure: the job failed for the reason in `result.message`, and the agent then
        # stopped the workers.
        return {}
    if cause is None or cause.rank is None:
        return failed
    rank = cause.rank
    if rank in failed and cause.pid not in (None, failed[rank].pid):
        # Two workers in a rendezvous may have held the same rank at different times.
        other = failed.pop(rank)
        failed[-1 - other.local_rank] = other
    if rank not in failed:
        from elasticrs._engine.supervise.attempts.cause import remote_failure

        remote = remote_failure(cause, result.clock)
        if result.attempts and all(failure.sent_signal is not None for failure in failed.values()):
            beats = _last_heartbeats(result.attempts[-1], remote.seen_ns, "here: ")
            remote.more_notes = [*remote.more_notes, *beats]
        failed = {rank: remote, **failed}
    failed[rank].is_first = True
    if cause.blamed is not None:
        failed[rank].named = f"{cause.blamed} (local_rank: {failed[rank].local_rank})"
    if cause.diagnosis is not None:
        failed[rank].more_notes = [cause.diagnosis, *failed[rank].more_notes]
    if result.attempts and cause.ground is not None and (cause.diagnosis is None or cause.blamed is None):
        note = f"it may have waited for rank {rank}, which hung first, judged over all nodes"
        if cause.diagnosis is not None:
            note = f"it waited for rank {rank}, as the flight records of all nodes show"
        global_ranks = result.attempts[-1].global_ranks()
        for late in (global_ranks[local_rank] for local_rank in result.attempts[-1].expired):
            if late != rank and late in failed:
                failed[late].more_notes = [note, *failed[late].more_notes]
    return failed


def _add_history(result: JobResult, failed: dict[int, ProcessFailure]) -> None:
    """Add notes to the root cause: why earlier attempts ended, and how long the restarts took."""
    restarts = [each for each in result.attempts if each.phases][-_MAX_RESTARTS:]
    began = (f"attempt {each.name} was running {each.how_it_began()}" for each in restarts)
    root = failed[root_cause(failed)]
    root.more_notes = [*root.more_notes, *earlier_causes(result.attempts), *began]


def print_report(
    job: JobSpec, result: JobResult, say: Callable[[str], None], write: Callable[[str], None]
) -> str | None:
    """Print the failure report of a job. The last line of the report contains the verdict and advice for the
    user.

    If ``TORCHELASTIC_ERROR_FILE`` is set for the launcher, write the root cause there.

    Args:
        job: configuration of the job.
        result: result of the job.
        say: prints a line with the launcher's prefix.
        write: prints text without a prefix.

    Returns:
        The headline; ``None`` if nothing is known about the failure.
    """
    failed = all_failures(result)
    told = None if result.phase is not Phase.FAILED else conclusion(job, result)
    if not failed:
        # The message already says why the job ended and what the user can do.
        if line := result.message or told:
            say(line)
        return result.message
    headline = headline_of(result, failed)
    write(format_report(job.name, failed, "=", "-", told) + os.linesep)
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        files = result.attempts[-1].files if result.attempts else FileAccess()
        if not files.run(partial(hand_on, ChildFailedError(job.name, failed), headline), False):
            say("the root cause was not written to TORCHELASTIC_ERROR_FILE: the file system does not respond")
    return headline


def conclusion(job: JobSpec, result: JobResult) -> str:
    """Return one line that says whether another attempt may succeed, and what the user can do next."""
    policy = job.restart_settings
    used = phrases.restarts_used(result.restarts, policy.max_restarts, policy.window)
    word, reason, next_ = {
        Verdict.PERMANENT: ("permanent", "another attempt would fail in the same way", "fix the root cause"),
        Verdict.UNFIT: (
            "unfit",
            "this node cannot run the job",
            f"take node {os.uname().nodename} out of service, and start the job on other nodes",
        ),
        Verdict.FAILED: (
            "transient",
            f"another attempt may succeed; restarts used: {used}",
            "fix the root cause, or allow more restarts (--max-restarts) if it can pass by itself",
        ),
    }[result.verdict]
    return f"verdict: {word} ({result.message or reason}); next: {next_}"


def hand_on(error: ChildFailedError, headline: str) -> bool:
    """Write the launcher's own error file, which the launcher's parent process reads. Copy the error file of
    the worker that failed first. If that file is not on this node, write a one-line summary of the failure
    instead. Return true after the file has been written.
    """
    from elasticrs.multiprocessing.errors import get_error_handler

    rank, first = error.get_first_failure()
    handler = get_error_handler()
    if os.path.isfile(first.error_file):
        handler.dump_error_file(first.error_file, first.exitcode or 0)
        return True
    import json

    extra = {
        "timestamp": str(int(first.timestamp)),
        "rank": str(rank),
        "node": first.host or os.uname().nodename,
    }
    message = {"message": headline, "errorCode": first.exitcode or 0, "extraInfo": extra}
    # Name the writer, so that the parent process does not take the file for its own. The parent may handle
    # this failure and then fail for another reason.
    writer = {"pid": os.getpid(), "written_by": "launcher"}
    path = os.environ["TORCHELASTIC_ERROR_FILE"]
    handler._rm(path)
    handler._write_error_file(path, json.dumps({"message": message, "elasticrs": writer}))
    return True


def _failure(attempt: Attempt, worker: _core.WorkerExited, unread: str = "") -> ProcessFailure:
    rank = worker.local_rank
    paths = attempt.paths
    note = oom_note(worker.exitcode, worker.sent_signal, attempt.oom_kills, attempt.oom_kills_after)
    timer = attempt.expired.get(rank)
    failure = failure_of(
        worker,
        *(paths.stdouts.get(rank), paths.stderrs.get(rank), paths.error_files.get(rank, "")),
        # Report the exception or the hang as the failure, because the signal that killed the worker later is
        # only a consequence.
        seen_ns=attempt.ended_ns(worker),
        sent_signal=worker.sent_signal if timer is None else None,
        cause=_cause(attempt, worker),
        note=note if worker.sent_signal is None else None,
        unread=unread,
    )
    if unread:
        failure.more_notes = [unread]
    raised = attempt.raised.get(rank)
    # Use the notice as well as the error file, because the file may be unreadable, or torch may have written
    # the file without this information.
    if raised is not None and raised.origin == "peer" and raised.pid in (worker.pid, failure.recorded_pid):
        failure.is_lost_peer = True
    if timer is not None and failure.error_file != NOT_AVAILABLE:
        # The message in the error file mentions only the signal that the worker received. Add the expired
        # time limit, because it is the reason for the signal.
        failure.note = attempt.why_expired(rank)
    _add_hang(attempt, worker, failure, is_read=not unread)
    return failure


def _add_hang(
    attempt: Attempt, worker: _core.WorkerExited, failure: ProcessFailure, *, is_read: bool
) -> None:
    """Add the stack of a hung worker and the last heartbeats of all ranks to the worker's failure."""
    rank = worker.local_rank
    if is_read and rank in attempt.expired and (error_file := attempt.paths.error_files.get(rank)):
        from elasticrs._engine.supervise.attempts import hangs

        path = hang_file(error_file)
        if os.path.isfile(path):
            others = 3 if attempt.expired[rank].raised is not None else 0
            failure.stack = hangs.stack(path, others=others)
            failure.log_paths["hang"] = path
    blame = attempt.blame
    if (
        blame is not None
        and not blame.is_decided
        and attempt.diagnosis is not None
        and rank in attempt.expired
    ):
        from elasticrs._engine.supervise.attempts import hangs

        failure.stack = hangs.stacks_of(attempt.diagnosis, blame.ranks) or failure.stack
    if rank == attempt.first_failure and attempt.diagnosis is not None and not attempt.expired:
        failure.more_notes = [attempt.diagnosis.summary]
    if rank == attempt.first_failure or (attempt.first_failure is None and rank in attempt.expired):
        failure.more_notes = [*failure.more_notes, *_last_heartbeats(attempt, failure.seen_ns)]
    if blame is not None and rank == attempt.first_failure and (len(blame.ranks) > 1 or not blame.is_decided):
        places = {each: place for place, each in attempt.global_ranks().items()}
        local_ranks = phrases.ranges_text(sorted(places[each] for each in blame.ranks))
        ranks = blame.text.removeprefix("ranks ").removeprefix("rank ")
        failure.named = f"{ranks} (local_rank: {local_ranks})"


def _last_heartbeats(attempt: Attempt, end_ns: int | None, where: str = "") -> list[str]:
    if not attempt.heartbeats:
        return []
    from elasticrs._engine.supervise.attempts import hangs

    end_ns = attempt.stamps.get("failure_seen", end_ns or attempt.stamps.get("ended", 0))
    notes = hangs.heartbeat_notes(attempt.heartbeats, end_ns, attempt.global_ranks())
    return [f"{where}{note}" for note in notes]


def _cause(attempt: Attempt, worker: _core.WorkerExited) -> str | None:
    if worker.local_rank in attempt.expired:
        return attempt.why_expired(worker.local_rank)
    if attempt.nursery_exitcode is not None:
        how = phrases.how_the_nursery_ended(attempt.nursery_exitcode, attempt.nursery_hung)
        return f"the nursery {how}, which killed the worker"
    if worker.local_rank in attempt.silent:
        return phrases.SILENT
    if worker.exitcode is None:
        return "the worker has exited, but its exit status is unknown"
    return None
