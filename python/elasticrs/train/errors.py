"""Exceptions that end the training loop or make it repeat a step."""

from __future__ import annotations

from elasticrs.errors import NonRetryable

__all__ = ["NonRetryableException", "RetryableException", "StopException"]


class StopException(Exception):  # noqa: N818 -- torchelastic's name
    """Raised to end the training loop when the job is closed."""


class NonRetryableException(NonRetryable):
    """Raised by a train step for an error that another attempt would repeat. The launcher then ends the job,
    as with :class:`elasticrs.errors.NonRetryable`.
    """


class CannotContinueError(NonRetryableException):
    """Raised by the loop when this process cannot continue training. Other workers may continue, and another
    attempt of the job may succeed.
    """

    may_succeed_later = True


class RetryableException(RuntimeError):  # noqa: N818 -- named like the others
    """Raised by a train step that must be repeated. The step is rolled back, and all workers start a new
    rendezvous round.

    Any other ``RuntimeError`` has the same effect, because PyTorch raises it when a collective fails.
    """
