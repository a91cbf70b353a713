"""Exceptions that end the training loop, or make it repeat a step."""

from __future__ import annotations

__all__ = ["NonRetryableException", "RetryableException", "StopException"]


class StopException(Exception):  # noqa: N818 -- torchelastic's name
    """Raised when the job is closed, to end the training loop."""


class NonRetryableException(Exception):  # noqa: N818 -- torchelastic's name
    """Raised when this process cannot continue. Other workers may continue."""


class RetryableException(RuntimeError):  # noqa: N818 -- named like the others
    """Raised by a train step that has to be repeated. The step is rolled back, and all workers start a new
    round.

    Any other ``RuntimeError`` has the same effect, because PyTorch raises it when a collective fails.
    """
