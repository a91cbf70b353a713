"""Errors of processes that could not be started.

They are a ``RuntimeError``, and what torch raises for a program that is not there, or may not be run: a
``FileNotFoundError`` or a ``PermissionError``.
"""

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
    """The error to raise.

    Args:
        text: what to say.
        number: of the system's error, if it was one.
    """
    error = _KINDS.get(number, RuntimeError)(text)
    if isinstance(error, OSError):
        error.errno = number
    return error
