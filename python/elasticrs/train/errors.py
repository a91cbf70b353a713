"""What ends a loop, and what it goes on after."""

from __future__ import annotations

__all__ = ["NonRetryableException", "RetryableException", "StopException"]


class StopException(Exception):  # noqa: N818 -- the name of 2019
    """The job is closed: the loop returns the state as it is."""


class NonRetryableException(Exception):  # noqa: N818 -- the name of 2019
    """The process cannot go on; others may."""


class RetryableException(RuntimeError):  # noqa: N818 -- beside the others
    """For train steps that want to be repeated: the step is rolled back, and all workers meet again.

    Every ``RuntimeError`` does so, because that is what PyTorch raises when a collective fails.
    """
