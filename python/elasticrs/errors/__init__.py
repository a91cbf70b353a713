"""Exceptions with which a worker tells the launcher how to react to its failure."""

from __future__ import annotations

__all__ = ["NonRetryable"]


class NonRetryable(Exception):  # noqa: N818 -- the name says what the launcher does
    """Raised by a worker for an error that another attempt would repeat, such as an invalid configuration.

    If a worker ends with this exception, with a subclass of it, or with an exception whose ``__cause__`` is
    one, the launcher stops the job on all nodes and restarts nothing, whatever ``--max-restarts`` is.
    """
