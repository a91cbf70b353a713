"""The children of a warm nursery that imports have started; see ``nursery.py``, which loads this."""

from __future__ import annotations

import os


def pids() -> list[int]:
    """Return the pids of all children, including those that have ended."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def end() -> None:
    """Kill the children that do not end by themselves soon, and wait for all of them.

    A resource tracker is never killed, because what it has not removed yet would be left in ``/dev/shm``. It
    ends once no process has its pipe, so at the latest after the others. The agent limits the wait, as it
    limits the whole import.
    """
    import select
    import signal
    import time

    deadline = time.monotonic() + 0.5
    while listed := pids():
        others = [pid for pid in listed if not _is_resource_tracker(pid)]
        left = deadline - time.monotonic()
        if left <= 0:
            for pid in others:
                os.kill(pid, signal.SIGKILL)
        poll, pidfds = select.poll(), [os.pidfd_open(pid) for pid in listed]
        for pidfd in pidfds:
            poll.register(pidfd, select.POLLIN)
        poll.poll(1000 * left if others and left > 0 else None)
        for pid, pidfd in zip(listed, pidfds, strict=True):
            os.close(pidfd)
            os.waitpid(pid, os.WNOHANG)


def _is_resource_tracker(pid: int) -> bool:
    """Return true if the process is the resource tracker of multiprocessing or of loky."""
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"resource_tracker" in file.read()
