"""Reports of a job, in the terminal and as JSON (``docs/report.schema.json``), the exit code, and a pod's
termination message. Imported only when a job has finished.
"""

from __future__ import annotations

import json
import os
from functools import partial

from elasticrs._engine import public
from elasticrs._engine.failures import ChildFailedError
from elasticrs._engine.failures.failure import (
    TORCH_HINT,
    ProcessFailure,
    failed_ns,
    failed_wall_ns,
    how_it_failed,
    remote_failure,
    root_cause,
    victims,
)
from elasticrs._engine.failures.report import format_report
from elasticrs._engine.job import phrases
from elasticrs._engine.job.restart_policy import Verdict
from elasticrs._engine.process.background_call import FileAccess
from elasticrs._engine.supervise.failed_attempt import failures, last_heartbeats, told_here
from elasticrs._engine.supervise.state_machine import SIGKILL, Phase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from elasticrs._engine.gpus.xids import Xid
    from elasticrs._engine.job.config import ExitCodes, JobSpec
    from elasticrs._engine.supervise.attempt import Attempt, JobResult

    Failures = Mapping[int, ProcessFailure]

_MAX_RESTARTS = 3
"""Maximum number of restarts whose durations are listed."""
_MAX_EARLIER = 8

SCHEMA = 1
"""Version of the JSON report. It changes when a field is removed or the meaning of a field changes."""

MAX_TERMINATION_MESSAGE = 4096
"""Maximum size of a termination message in bytes. Kubernetes truncates longer messages."""

_MAX_TEXT = 16384


def exit_code(codes: ExitCodes, result: JobResult, failed: Failures) -> int:
    if result.phase is not Phase.FAILED:
        return result.exit_code
    if codes.kind == "verdict":
        special = {Verdict.PERMANENT: codes.permanent, Verdict.UNFIT: codes.unfit}
        return special.get(result.verdict, result.exit_code)
    if codes.kind == "worker" and failed:
        rank, cause = root_cause(failed), result.first_cause
        root = failed[rank]
        was_killed = cause is not None and cause.rank == rank and cause.was_killed
        # If an agent (on any node) killed the worker, the exit code only reflects the agent's signal.
        code = root.exitcode if root.sent_signal is None and not was_killed else None
        # As a shell does, report death by a signal as 128 plus the signal number.
        return result.exit_code if not code else code if code > 0 else 128 - code
    return result.exit_code


def report(
    job: JobSpec, result: JobResult, failed: Failures, headline: str | None, code: int
) -> dict[str, Any]:
    root = root_cause(failed) if failed else None
    if root is not None and failed[root].cause_outside is not None:
        root = None
    stopped = victims(failed)
    blame = result.attempts[-1].blame if result.attempts else None
    return {
        "schema": SCHEMA,
        "run_id": job.run_id,
        "name": job.name,
        "role": job.role,
        "node": os.uname().nodename,
        "outcome": result.phase.value,
        "verdict": result.verdict.value if result.phase is Phase.FAILED else None,
        "exit_code": code,
        "signal": SIGKILL if result.was_killed else result.signum,
        "reason": result.message or result.how_stopped,
        "headline": headline,
        "root_cause": root if blame is None or blame.is_decided else None,
        "blamed": None if blame is None else {**blame._asdict(), "basis": blame.basis.value},
        "failures": [_failure(rank, each, rank in stopped) for rank, each in failed.items()],
        "restarts": {
            "charged": result.restarts,
            "max": int(job.max_restarts),
            "window": job.restart_settings.window,
        },
        "attempts": [_attempt(each, _cause(result, each, headline)) for each in result.attempts],
    }


def _failure(rank: int, failure: ProcessFailure, was_stopped: bool) -> dict[str, Any]:
    message = failure.message if isinstance(failure.message, str) else failure.message.get("message")
    return {
        # A negative rank is a placeholder for a worker whose rank another worker has taken over.
        "rank": rank if rank >= 0 else None,
        "local_rank": failure.local_rank,
        "node": failure.host or os.uname().nodename,
        "pid": failure.pid,
        "exit_code": failure.exitcode,
        "signal": failure.signal_name() if failure.signal_number() else None,
        "was_stopped": was_stopped,
        "exception": failure.exception,
        "place": failure.place,
        "message": None if message in (None, TORCH_HINT) else str(message)[-_MAX_TEXT:],
        "time": failed_wall_ns(failure) / 1e9,
        "failed_ns": failed_ns(failure),
        "error_file": failure.error_file if os.path.isfile(failure.error_file) else None,
        "logs": failure.log_paths,
    }


def _cause(result: JobResult, attempt: Attempt, headline: str | None) -> str | None:
    if attempt is result.attempts[-1] and result.phase is Phase.FAILED:
        return headline or result.message
    return attempt.cause


def _attempt(attempt: Attempt, cause: str | None) -> dict[str, Any]:
    stamps = attempt.stamps
    ran = (stamps["ended"] - stamps["started"]) / 1e9 if {"started", "ended"} <= stamps.keys() else None
    return {
        "name": attempt.name,
        "round": attempt.round,
        "restarts": attempt.restarts,
        "world_size": attempt.world_size,
        "seconds": ran,
        "cause": cause,
        "exits": _exits(attempt),
        "xids": [_xid(attempt, xid) for xid in attempt.xids.values()],
    }


def _exits(attempt: Attempt) -> list[dict[str, Any]]:
    ranks = attempt.shown_ranks()
    return [
        {
            "rank": ranks[local_rank],
            "local_rank": local_rank,
            "pid": exited.pid,
            "exit_code": exited.exitcode,
            "was_stopped": exited.sent_signal is not None,
        }
        for local_rank, exited in sorted(attempt.exits.items())
    ]


def _xid(attempt: Attempt, xid: Xid) -> dict[str, Any]:
    from elasticrs._engine.gpus.xids import meaning

    found, ranks = meaning(xid.code, xid.detail), attempt.global_ranks()
    workers = [local_rank for local_rank, pid in enumerate(attempt.pids) if pid in xid.workers]
    return {
        "code": xid.code,
        "gpu": xid.gpu,
        "count": xid.count,
        "pids": xid.pids,
        "ranks": [ranks[local_rank] for local_rank in workers],
        "text": found.text,
        "action": found.action,
        "detail": xid.detail,
    }


def encode(document: Mapping[str, Any]) -> str:
    """Return JSON in ASCII, because a file name that is not valid UTF-8 could otherwise not be written."""
    return json.dumps(document, indent=1, default=str) + "\n"


def termination_message(document: Mapping[str, Any]) -> str:
    """Return the verdict, the reason, the headline and the failures; see :data:`MAX_TERMINATION_MESSAGE`."""
    verdict = document["verdict"] or document["outcome"]
    lines = [f"{verdict}: {document['reason'] or document['headline'] or ''}"]
    if document["reason"] and document["headline"] and document["headline"] != document["reason"]:
        lines.append(document["headline"])
    lines += [_in_one_line(failure) for failure in document["failures"] if not failure["was_stopped"]]
    text = "\n".join(lines).encode("utf-8", "backslashreplace")
    return text[:MAX_TERMINATION_MESSAGE].decode("utf-8", "ignore")


def _in_one_line(failure: Mapping[str, Any]) -> str:
    rank = failure["rank"]
    who = f"local rank {failure['local_rank']}" if rank is None else f"rank {rank}"
    told = failure["message"]
    if told is None:
        code = failure["exit_code"]
        told = "unknown exit status" if code is None else failure["signal"] or f"exit code {code}"
    return f"{who} on {failure['node']}: {told}"


# --- the report in the terminal ---


def headline_of(result: JobResult, failed: Mapping[int, ProcessFailure]) -> str:
    rank = root_cause(failed)
    failure, cause = failed[rank], result.first_cause
    if failure.cause_outside is not None:
        return failure.cause_outside
    attempt = result.attempts[-1] if result.attempts else None
    if failure.host is not None and cause is not None:
        is_same_round = attempt is not None and cause.round in (None, attempt.round)
        world = f" of {attempt.world_size}" if attempt is not None and is_same_round else ""
        told = f"rank {rank}{world} on node {cause.node}{how_it_failed(failure)}"
    else:
        assert attempt is not None
        world = f" of {attempt.world_size}" if attempt.plan.members is None else ""
        who = attempt.who_failed(failure.local_rank, of=world)
        told = who + told_here(attempt, failure)
    return told if cause is None or cause.diagnosis is None else f"{told}; {cause.diagnosis}"


def earlier_causes(attempts: Sequence[Attempt]) -> list[str]:
    """Return why workers were replaced and why earlier attempts ended. Merge consecutive equal reasons."""
    found: list[tuple[str, list[str]]] = []
    for attempt in attempts:
        replaced = [each.cause for each in attempt.replaced_workers]
        own = [] if attempt is attempts[-1] else [attempt.cause]
        for cause in filter(None, [*replaced, *own]):
            if not found or found[-1][0] != cause:
                found.append((cause, []))
            found[-1][1].append(phrases.attempt_text(attempt.name))
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
    """Return failures by rank: the failures on this node in the last attempt, and the first failure of the
    job. Add the causes of earlier failures to the notes of the root cause. If the root cause only reports a
    lost worker, and an error outside of the workers has ended the job, add that error as the explanation.
    """
    failed = _last_failures(result)
    if failed:
        _add_history(result, failed)
        root = failed[root_cause(failed)]
        if result.is_outside and root.is_lost_peer:
            root.cause_outside = result.message
    return failed


def _last_failures(result: JobResult) -> dict[int, ProcessFailure]:
    failed = failures(result.attempts[-1]) if result.attempts else {}
    cause = result.first_cause
    if cause is not None and failed and cause.round not in (None, result.attempts[-1].round):
        # The job recovered from these failures, and failed in a later round without this node.
        failed = {}
    if cause is None and result.message is not None and len(victims(failed)) == len(failed):
        # The job failed for the reason in `result.message`, and the agent then stopped the workers.
        return {}
    if cause is None or cause.rank is None:
        return failed
    rank = cause.rank
    if rank in failed and cause.pid not in (None, failed[rank].pid):
        # Two workers in a rendezvous may have held the same rank at different times.
        other = failed.pop(rank)
        failed[-1 - other.local_rank] = other
    if rank not in failed:
        remote = remote_failure(cause, result.clock)
        if result.attempts and all(failure.sent_signal is not None for failure in failed.values()):
            beats = last_heartbeats(result.attempts[-1], remote.seen_ns, "here: ")
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
    began = (
        f"attempt {phrases.attempt_text(each.name)} was running {each.how_it_began()}" for each in restarts
    )
    root = failed[root_cause(failed)]
    kept = [] if result.kept is None else [result.kept.at_end()]
    root.more_notes = [*root.more_notes, *earlier_causes(result.attempts), *began, *kept]


def print_report(
    job: JobSpec, result: JobResult, say: Callable[[str], None], write: Callable[[str], None]
) -> str | None:
    """Print the failure report, and write the root cause to the launcher's ``TORCHELASTIC_ERROR_FILE``.
    ``say`` adds the launcher's prefix to a line. Return the headline; ``None`` if the failure is unknown.
    """
    failed = all_failures(result)
    is_outside = bool(failed) and failed[root_cause(failed)].cause_outside is not None
    known = "the cause is outside of the workers" if is_outside else result.message
    told = None if result.phase is not Phase.FAILED else conclusion(job, result, known)
    if not failed:
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


def conclusion(job: JobSpec, result: JobResult, known: str | None) -> str:
    """Return the verdict line of the report. ``known`` replaces the usual reason, unless it is ``None``."""
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
    if result.is_outside:
        next_ = "remove the cause of this error, and start the job again; more restarts do not help"
    return f"verdict: {word} ({known or reason}); next: {next_}"


def hand_on(error: ChildFailedError, headline: str) -> bool:
    """Write the launcher's own error file. Copy the error file of the worker that failed first, if it is on
    this node and that failure is the root cause. Otherwise, write one line about the root cause.
    """
    rank, first = error.get_first_failure()
    handler = public("multiprocessing.errors.get_error_handler")()
    if first.cause_outside is None and os.path.isfile(first.error_file):
        handler.dump_error_file(first.error_file, first.exitcode or 0)
        return True
    extra = {
        "timestamp": str(int(first.timestamp)),
        "rank": str(rank),
        "node": first.host or os.uname().nodename,
    }
    message = {"message": headline, "errorCode": first.exitcode or 0, "extraInfo": extra}
    # Name the writer, because the parent may handle this failure and then fail for another reason.
    writer = {"pid": os.getpid(), "written_by": "launcher"}
    path = os.environ["TORCHELASTIC_ERROR_FILE"]
    handler._rm(path)
    handler._write_error_file(path, json.dumps({"message": message, "elasticrs": writer}))
    return True
