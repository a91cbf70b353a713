"""Exceptions that end the training loop or make it repeat a step."""

from __future__ import annotations

__all__ = ["NonRetryableException", "RetryableException", "StopException"]


class StopException(Exception):  # noqa: N818 -- torchelastic's name
    """Raised to end the training loop when the job is closed."""


class NonRetryableException(Exception):  # noqa: N818 -- torchelastic's name
    """Raised when this process cannot continue training. Other workers may continue."""


class RetryableException(RuntimeError):  # noqa: N818 -- named like the others
    """Raised by a train step that must be repeated. The step is rolled back, and all workers start a new
    rendezvous round.

    Any other ``RuntimeError`` has the same effect, because PyTorch raises it when a collective fails.
    """
