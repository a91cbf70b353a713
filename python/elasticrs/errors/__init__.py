"""Exceptions that control how the launcher reacts to a worker's failure, and exceptions of the launcher."""

from __future__ import annotations

from elasticrs import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs._engine.failures import JobFailedError

__all__ = ["JobFailedError", "NonRetryable"]


class NonRetryable(Exception):  # noqa: N818 -- the name says what the launcher does
    """Raised by a worker for an error that another attempt would repeat, such as an invalid configuration.

    The launcher then stops the job on all nodes and restarts no worker. The same applies to a subclass, to an
    exception that has ``NonRetryable`` as its ``__cause__``, and to an exception group that contains one.
    """


def __getattr__(name: str) -> object:
    # Import lazily, because workers need only `NonRetryable`.
    return lazy(__name__, name, {"elasticrs._engine.failures": ("JobFailedError",)})
