"""Describes the outcome of a job to other programs: the JSON report, the launcher's exit code, and a pod's
termination message. ``docs/report.schema.json`` describes the JSON report. Imported only when a job has
finished.
"""

from __future__ import annotations

import json
import os

from elasticrs._engine.job.failure_cause import Verdict
from elasticrs._engine.supervise.attempts.state_machine import Phase
from elasticrs._engine.workers.failures.failure import TORCH_HINT
from elasticrs._engine.workers.failures.root_cause import failed_ns, failed_wall_ns, root_cause, victims

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from elasticrs._engine.gpus.xids import Xid
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.job.policy_options import ExitCodes
    from elasticrs._engine.supervise.attempts.attempt import Attempt, JobResult
    from elasticrs._engine.workers.failures.failure import ProcessFailure

    Failures = Mapping[int, ProcessFailure]

SCHEMA = 1
"""Version of the JSON report. It changes when a field is removed or the meaning of a field changes."""

MAX_TERMINATION_MESSAGE = 4096
"""Maximum size of a pod's termination message in bytes. Kubernetes truncates longer messages."""

_MAX_TEXT = 16384
"""Maximum number of characters of a failure's message in the JSON report."""


def exit_code(codes: ExitCodes, result: JobResult, failed: Failures) -> int:
    """Return the exit code of the launcher.

    Args:
        codes: exit codes that the user has chosen.
        result: result of the job.
        failed: the result of :func:`.all_failures`.
    """
    if result.phase is not Phase.FAILED:
        return result.exit_code
    if codes.kind == "verdict":
        special = {Verdict.PERMANENT: codes.permanent, Verdict.UNFIT: codes.unfit}
        return special.get(result.verdict, result.exit_code)
    if codes.kind == "worker" and failed:
        rank, cause = root_cause(failed), result.first_cause
        root = failed[rank]
        was_killed = cause is not None and cause.rank == rank and cause.was_killed
        # Ignore the exit code if the agent killed the worker, because the code only reflects the agent's
        # signal. The same applies if the agent of another node killed the worker.
        code = root.exitcode if root.sent_signal is None and not was_killed else None
        # As a shell does, report death by a signal as 128 plus the signal number.
        return result.exit_code if not code else code if code > 0 else 128 - code
    return result.exit_code


def report(
    job: JobSpec, result: JobResult, failed: Failures, headline: str | None, code: int
) -> dict[str, Any]:
    """Return the JSON report of a finished job.

    Args:
        job: configuration of the job.
        result: result of the job.
        failed: the result of :func:`.all_failures`.
        headline: the failure in one line; ``None`` if the job did not fail.
        code: exit code of the launcher.
    """
    root = root_cause(failed) if failed else None
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
        "signal": result.signum,
        "reason": result.message,
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
    """Return the exits of an attempt's workers, including those that did not fail."""
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
    """Return the report as JSON text. The text contains only ASCII characters, because a file name that is
    not valid UTF-8 could otherwise not be written.
    """
    return json.dumps(document, indent=1, default=str) + "\n"


def termination_message(document: Mapping[str, Any]) -> str:
    """Return a pod's termination message: the verdict, the reason, the headline, and the failures, in at most
    :data:`MAX_TERMINATION_MESSAGE` bytes.
    """
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
