"""Redirection of this process's standard streams at the file descriptor level, with torch's names."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from elasticrs._engine.process.console import DESCRIPTORS, descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["get_libc", "redirect", "redirect_stderr", "redirect_stdout"]


def get_libc() -> ctypes.CDLL:
    """Return the C library that this process has loaded."""
    return ctypes.CDLL(None)


libc = get_libc()


@contextmanager
def redirect(std: str, to_file: str) -> Iterator[None]:
    """Redirect ``"stdout"`` or ``"stderr"``, also of C code and child processes, to a file during the block.

    Raises:
        ValueError: the name is unknown.
        OSError: the file, which is truncated first as in torch, cannot be opened.
    """
    if std not in DESCRIPTORS:
        raise ValueError(f"unknown standard stream <{std}>, must be one of {set(DESCRIPTORS)}")
    with ExitStack() as kept:
        target = os.open(to_file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        kept.callback(os.close, target)
        originals: dict[int, int] = {}
        for descriptor in descriptors(std):
            originals[descriptor] = os.dup(descriptor)
            kept.callback(os.close, originals[descriptor])
        _switch(std, dict.fromkeys(originals, target))
        try:
            yield
        finally:
            _switch(std, originals)


redirect_stdout = partial(redirect, "stdout")
redirect_stderr = partial(redirect, "stderr")


def _switch(std: str, targets: dict[int, int]) -> None:
    libc.fflush(None)
    stream = getattr(sys, std)
    if stream is not None:
        stream.flush()
    for descriptor, target in targets.items():
        os.dup2(target, descriptor)
