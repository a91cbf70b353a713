"""Standard output and error of this process into files, by descriptor, with torch's names."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["get_libc", "redirect", "redirect_stderr", "redirect_stdout"]

_DESCRIPTORS = {"stdout": 1, "stderr": 2}


def get_libc() -> ctypes.CDLL:
    """The C library of this process, whichever it is."""
    return ctypes.CDLL(None)


libc = get_libc()


@contextmanager
def redirect(std: str, to_file: str) -> Iterator[None]:
    """Send a stream into a file: what Python, C code and child processes write alike.

    Args:
        std: ``"stdout"`` or ``"stderr"``.
        to_file: is emptied first, as with torch.

    Raises:
        ValueError: another name.
        OSError: the file cannot be opened.
    """
    if std not in _DESCRIPTORS:
        raise ValueError(f"unknown standard stream <{std}>, must be one of {set(_DESCRIPTORS)}")
    descriptor = _descriptor(std)
    target = os.open(to_file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        original = os.dup(descriptor)
    except BaseException:
        os.close(target)
        raise
    try:
        _switch(std, target, descriptor)
        try:
            yield
        finally:
            _switch(std, original, descriptor)
    finally:
        os.close(target)
        os.close(original)


redirect_stdout = partial(redirect, "stdout")
redirect_stderr = partial(redirect, "stderr")


def _descriptor(std: str) -> int:
    try:
        return int(getattr(sys, std).fileno())
    except (AttributeError, OSError, ValueError):
        # Replaced by an object without a descriptor: C code and children write to this one.
        return _DESCRIPTORS[std]


def _switch(std: str, target: int, descriptor: int) -> None:
    libc.fflush(None)
    stream = getattr(sys, std)
    if stream is not None:
        stream.flush()
    os.dup2(target, descriptor)
