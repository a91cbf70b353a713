"""Pausing threads of other processes, as if they hung in the kernel."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_SEIZE, _INTERRUPT, _DETACH, _EVERY_THREAD = 0x4206, 0x4207, 17, 0x40000000


def thread_of(pid: int, name: str) -> int | None:
    """Return the thread with this name, or ``None``. The kernel keeps only 15 bytes of a name."""
    found = [
        int(task.name)
        for task in Path(f"/proc/{pid}/task").iterdir()
        if (task / "comm").read_text().strip() == name[:15]
    ]
    assert len(found) <= 1, found
    return found[0] if found else None


def trace(thread: int) -> ctypes.CDLL:
    """Trace a thread, so that this process sees its exit before its parent does. The thread keeps running."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    if libc.ptrace(_SEIZE, thread, None, None) != 0:
        pytest.skip(f"threads cannot be traced: {os.strerror(ctypes.get_errno())}")
    return libc


def hold(thread: int | None) -> ctypes.CDLL:
    """Pause a thread until it is detached, or until its process exits; see :func:`gone`."""
    assert thread is not None
    libc = trace(thread)
    assert libc.ptrace(_INTERRUPT, thread, None, None) == 0
    assert os.waitpid(thread, _EVERY_THREAD)[0] == thread
    return libc


def gone(thread: int) -> bool:
    """Wait until a paused thread has exited. Return false if a signal killed it."""
    return os.WIFEXITED(os.waitpid(thread, _EVERY_THREAD)[1])


@contextlib.contextmanager
def held(thread: int | None) -> Iterator[None]:
    """Pause a thread during the ``with`` block."""
    libc = hold(thread)
    try:
        yield
    finally:
        assert libc.ptrace(_DETACH, thread, None, None) == 0
