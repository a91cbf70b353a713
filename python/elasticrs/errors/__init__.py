"""Exceptions that a worker raises to control how the launcher reacts to its failure, and the base class of
the launcher's exceptions for a failed job.
"""

from __future__ import annotations

from elasticrs import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs._engine.failures.errors import JobFailedError

__all__ = ["JobFailedError", "NonRetryable"]


class NonRetryable(Exception):  # noqa: N818 -- the name says what the launcher does
    """Raised by a worker for an error that another attempt would repeat, such as an invalid configuration.

    If this exception ends a worker, the launcher stops the job on all nodes and restarts no worker, even if
    ``--max-restarts`` allows further restarts. The same applies to a subclass, to an exception that has
    ``NonRetryable`` as its ``__cause__``, and to an exception group that contains one.
    """


def __getattr__(name: str) -> object:
    # Import the class lazily, because workers need only `NonRetryable`.
    return lazy(__name__, name, {"elasticrs._engine.failures.errors": ("JobFailedError",)})
