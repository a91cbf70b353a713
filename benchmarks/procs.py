"""Finds the descendants of this process, and makes sure that none is left.

A benchmark kills launchers, and a launcher that is killed leaves orphans. While a job is measured this
process is their subreaper, so they become its children: a child's pid is not used again before it is reaped,
and the number is safe to kill.
"""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h


def children(pid: int) -> list[int]:
    """Return the children of all threads of a process; an empty list if it has exited."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        texts = [(task / "children").read_text(encoding="ascii") for task in tasks]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for text in texts for child in text.split()]


def tree(pid: int) -> list[int]:
    """Return the process and all its descendants, parents first."""
    found = [pid]
    for each in found:
        found += children(each)
    return found


@contextmanager
def nothing_left() -> Iterator[None]:
    """At the end of the block, kill and reap all processes that it started, including orphans."""
    kept = set(children(os.getpid()))
    before = _is_subreaper()
    _become_subreaper(True)
    try:
        yield
    finally:
        # Repeat this, because children of a killed process are reparented to this process before the killed
        # one can be reaped.
        while mine := [pid for pid in children(os.getpid()) if pid not in kept]:
            for pid in mine:
                os.kill(pid, signal.SIGKILL)
            for pid in mine:
                os.waitpid(pid, 0)
        _become_subreaper(before)


def _is_subreaper() -> bool:
    value = ctypes.c_int()
    _prctl(_GET_CHILD_SUBREAPER, ctypes.byref(value))
    return bool(value.value)


def _become_subreaper(wanted: bool) -> None:
    _prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(wanted))


def _prctl(option: int, argument: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
