"""Exceptions for processes that could not be started."""

from __future__ import annotations

import errno

from elasticrs.errors import JobFailedError


class NotStartedError(JobFailedError, RuntimeError):
    """Raised if worker processes could not be started."""


class _NotFoundError(NotStartedError, FileNotFoundError):
    pass


class _NotPermittedError(NotStartedError, PermissionError):
    pass


_KINDS: dict[int | None, type[NotStartedError]] = {
    errno.ENOENT: _NotFoundError,
    errno.EACCES: _NotPermittedError,
    errno.EPERM: _NotPermittedError,
}


def not_started(text: str, number: int | None) -> NotStartedError:
    """Return a ``RuntimeError`` for the caller to raise. As in torch, it is also a ``FileNotFoundError`` if
    the program is missing, or a ``PermissionError`` if it is not executable.
    """
    error = _KINDS.get(number, NotStartedError)(text)
    if isinstance(error, OSError):
        error.errno = number
    return error
