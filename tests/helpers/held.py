"""Threads of other processes that do not run, as if they hung in the kernel."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_SEIZE, _INTERRUPT, _DETACH, _EVERY_THREAD = 0x4206, 0x4207, 17, 0x40000000


def thread_of(pid: int, name: str) -> int | None:
    """The thread of that name, of which there is one at most; the kernel keeps 15 bytes of a name."""
    found = [
        int(task.name)
        for task in Path(f"/proc/{pid}/task").iterdir()
        if (task / "comm").read_text().strip() == name[:15]
    ]
    assert len(found) <= 1, found
    return found[0] if found else None


def trace(thread: int) -> ctypes.CDLL:
    """Be told of its end before its parent is; until then it runs on."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    if libc.ptrace(_SEIZE, thread, None, None) != 0:
        pytest.skip(f"threads cannot be traced: {os.strerror(ctypes.get_errno())}")
    return libc


def hold(thread: int | None) -> ctypes.CDLL:
    """This thread does not run until it is let go, or has gone with its process: :func:`gone`."""
    assert thread is not None
    libc = trace(thread)
    assert libc.ptrace(_INTERRUPT, thread, None, None) == 0
    assert os.waitpid(thread, _EVERY_THREAD)[0] == thread
    return libc


def gone(thread: int) -> bool:
    """Wait for the end of a held thread: whether it is the process that has ended it."""
    return os.WIFEXITED(os.waitpid(thread, _EVERY_THREAD)[1])


@contextlib.contextmanager
def held(thread: int | None) -> Iterator[None]:
    """This thread does not run meanwhile."""
    libc = hold(thread)
    try:
        yield
    finally:
        assert libc.ptrace(_DETACH, thread, None, None) == 0
