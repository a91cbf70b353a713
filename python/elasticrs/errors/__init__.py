"""Exceptions that a worker raises to control how the launcher reacts to its failure, and the base class of
the launcher's exceptions for a failed job.
"""

from __future__ import annotations

__all__ = ["JobFailedError", "NonRetryable"]


class NonRetryable(Exception):  # noqa: N818 -- the name says what the launcher does
    """Raised by a worker for an error that another attempt would repeat, such as an invalid configuration.

    If this exception ends a worker, the launcher stops the job on all nodes and restarts no worker, even if
    ``--max-restarts`` allows further restarts. The same applies to a subclass, to an exception that has
    ``NonRetryable`` as its ``__cause__``, and to an exception group that contains one.
    """


class JobFailedError(Exception):
    """Base class of the exceptions that :class:`~elasticrs.launcher.elastic_launch` raises for a failed job.

    The exception is a :class:`~elasticrs.multiprocessing.errors.ChildFailedError` if workers failed, or a
    ``RuntimeError`` if the workers could not be started.

    Attributes:
        verdict: advice to a scheduler: ``"failed"`` if another attempt may succeed, ``"permanent"`` if every
            other attempt would fail in the same way, or ``"unfit"`` if this node cannot run the job.
        exit_code: exit code for this verdict, as configured with ``LaunchConfig(exit_codes=…)``.
        reason: one line that says why the job was not restarted; ``None`` if the workers' failures are a
            sufficient explanation.
    """

    verdict: str = "failed"
    exit_code: int = 1
    reason: str | None = None
