"""Report the outcome of a job: return the exit code, and write the JSON report and the pod's termination
message.
"""

from __future__ import annotations

import os
from functools import partial

from elasticrs._engine.supervise.attempts.state_machine import Phase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.supervise.attempts.attempt import JobResult

TERMINATION_LOG = "/dev/termination-log"
"""File from which Kubernetes reads the termination message of a container."""

TERMINATION_LOG_VARIABLE = "ELASTICRS_TERMINATION_LOG"
"""Environment variable with a different path, for containers that set ``terminationMessagePath``. If it is
empty, no message is written.
"""


def make_report_folder(path: str) -> None:
    """Create the folder of the JSON report, so that a mistake in the path is noticed before the job runs.

    Raises:
        UsageError: the folder cannot be created, or the path is itself a folder.
    """
    from elasticrs._engine.job.config import UsageError

    if os.path.isdir(path):
        raise UsageError(f"--report: got {path!r}, which is a folder; name a file in it")
    try:
        os.makedirs(os.path.dirname(path) or os.curdir, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--report: got {path!r}, whose folder cannot be created: {error.strerror}"
        ) from None


def conclude(job: JobSpec, result: JobResult, headline: str | None, say: Callable[[str], None]) -> int:
    """Write the JSON report and the termination message of a finished job, and return the launcher's exit
    code. Print a line for each file that cannot be written.

    Args:
        job: configuration of the job.
        result: result of the job.
        headline: the failure in one line; ``None`` if the job did not fail.
        say: prints a line for the user.
    """
    path = _termination_log() if result.phase is Phase.FAILED else None
    if job.report is None and path is None and (result.exit_code == 0 or job.exit_codes == "torchrun"):
        return result.exit_code
    from elasticrs._engine.job.policy_options import ExitCodes
    from elasticrs._engine.supervise.observe import job_report
    from elasticrs._engine.supervise.observe.job_report import all_failures

    failed = all_failures(result) if result.phase is Phase.FAILED else {}
    code = job_report.exit_code(ExitCodes.parse(job.exit_codes), result, failed)
    document = job_report.report(job, result, failed, headline, code)
    if job.report is not None:
        _write(job.report, job_report.encode(document), "--report", say)
    if path is not None:
        _write(path, job_report.termination_message(document), "the termination message", say)
    return code


def conclude_stopped(job: JobSpec, result: JobResult, why: str, say: Callable[[str], None]) -> int:
    """Like :func:`conclude`, but for a job whose supervisor has failed.

    Args:
        job: configuration of the job.
        result: result of the job so far.
        why: description of the error.
        say: prints a line for the user.
    """
    result.phase, result.message = Phase.FAILED, why
    try:
        return conclude(job, result, why, say)
    except (OSError, ImportError) as error:
        # Catch `ImportError`, because the imports in `conclude` fail if no file descriptors are left.
        say(f"the outcome of the job could not be written: {error}")
        return 1


def _termination_log() -> str | None:
    """Return the path of the pod's termination log. Return ``None`` if no writable log exists, or if it is
    also the launcher's error file.
    """
    path = os.environ.get(TERMINATION_LOG_VARIABLE, TERMINATION_LOG)
    is_usable = bool(path) and os.path.isfile(path) and os.access(path, os.W_OK)
    return path if is_usable and path != os.environ.get("TORCHELASTIC_ERROR_FILE") else None


def _write(path: str, text: str, what: str, say: Callable[[str], None]) -> None:
    from elasticrs._engine.inside.error_file import write_whole
    from elasticrs._engine.process.background_call import FILE_LIMIT, FileAccess

    def hangs() -> None:
        say(
            f"{what} could not be written to {path} within {FILE_LIMIT:g} s: its file system does not respond"
        )

    try:
        FileAccess(hangs).run(partial(write_whole, path, text), None)
    except OSError as error:
        say(f"{what} could not be written to {path}: {error.strerror}")
