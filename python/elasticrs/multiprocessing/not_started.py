"""Exceptions for processes that could not be started."""

from __future__ import annotations

import errno


class _NotFoundError(RuntimeError, FileNotFoundError):
    pass


class _NotPermittedError(RuntimeError, PermissionError):
    pass


_KINDS: dict[int | None, type[RuntimeError]] = {
    errno.ENOENT: _NotFoundError,
    errno.EACCES: _NotPermittedError,
    errno.EPERM: _NotPermittedError,
}


def not_started(text: str, number: int | None) -> RuntimeError:
    """Return a ``RuntimeError`` for the caller to raise. As in torch, the exception is also a
    ``FileNotFoundError`` or ``PermissionError`` if the error number ``number`` means that the program is
    missing or not executable.
    """
    error = _KINDS.get(number, RuntimeError)(text)
    if isinstance(error, OSError):
        error.errno = number
    return error
