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
    """Return a ``RuntimeError`` for the caller to raise. If ``number`` is the errno for a program that is
    missing or not executable, the exception is also a ``FileNotFoundError`` or ``PermissionError``, as in
    torch.
    """
    error = _KINDS.get(number, RuntimeError)(text)
    if isinstance(error, OSError):
        error.errno = number
    return error
