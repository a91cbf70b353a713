"""Exceptions that a worker raises to control how the launcher reacts to the worker's failure."""

from __future__ import annotations

__all__ = ["NonRetryable"]


class NonRetryable(Exception):  # noqa: N818 -- the name says what the launcher does
    """Raised by a worker for an error that another attempt would repeat, such as an invalid configuration.

    If this exception ends a worker, the launcher stops the job on all nodes and restarts no worker, even if
    ``--max-restarts`` allows further restarts. The same applies to a subclass, to an exception that has
    ``NonRetryable`` as its ``__cause__``, and to an exception group that contains one.
    """
