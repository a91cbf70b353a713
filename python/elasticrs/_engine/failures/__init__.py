"""Explains why a job failed: reads the failures of its workers, finds the root cause, and writes the report.

This file defines the exceptions for a failed job, which users import from :mod:`elasticrs.errors` and
:mod:`elasticrs.multiprocessing.errors`. Workers import this file, too, so its functions import what is needed
only after a failure.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elasticrs._engine.failures.failure import ProcessFailure


class JobFailedError(Exception):
    """Base class of the exceptions that :class:`~elasticrs.launcher.elastic_launch` raises for a failed job.

    The exception is a :class:`~elasticrs.multiprocessing.errors.ChildFailedError` if workers failed, or a
    ``RuntimeError`` if the workers could not be started.

    Attributes:
        verdict: advice to a scheduler: ``"failed"`` if another attempt may succeed, ``"permanent"`` if every
            other attempt would fail in the same way, or ``"unfit"`` if this node cannot run the job.
        exit_code: exit code for this verdict, as configured with ``LaunchConfig(exit_codes=…)``.
        reason: one line that says why the job was not restarted; ``None`` if the failures explain it.
    """

    __module__ = "elasticrs.errors"

    verdict: str = "failed"
    exit_code: int = 1
    reason: str | None = None


class ChildFailedError(JobFailedError):
    """Raised when workers have failed. The text of the exception is the failure report.

    Under :func:`record`, the error file contains the traceback of the failed worker instead of a traceback of
    this exception.

    Args:
        name: name of the script, program or function.
        failures: failures by global rank, including workers that exited because elasticrs stopped them.

    Raises:
        AssertionError: there are no failures (as in torch).
    """

    __module__ = "elasticrs.multiprocessing.errors"

    def __init__(self, name: str, failures: dict[int, ProcessFailure]) -> None:
        self.name = name
        self.failures = failures
        if not failures:
            raise AssertionError("a ChildFailedError needs a failure")
        super().__init__(self.format_msg())

    def __reduce__(self) -> tuple[Any, ...]:
        # Python's default way of unpickling would pass the report as the constructor's only argument.
        return type(self), (self.name, self.failures), self.__dict__

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the rank and failure of the worker whose failure is the root cause (:func:`.root_cause`)."""
        from elasticrs._engine.failures.failure import root_cause

        rank = root_cause(self.failures)
        return rank, self.failures[rank]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """Return the failure report. The arguments are the characters that form its separator lines."""
        from elasticrs._engine.failures.report import format_report

        return format_report(self.name, self.failures, boarder_delim, section_delim)
