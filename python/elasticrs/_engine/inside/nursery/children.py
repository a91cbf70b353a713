"""Finds and kills child processes that imports have started in a warm nursery (the process that forks
workers). Loaded by ``nursery.py``.
"""

from __future__ import annotations

import os


def pids() -> list[int]:
    """Return the pids of all child processes, including zombies."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def end() -> None:
    """Kill the children that do not exit within half a second, and reap all children.

    Resource trackers are never killed, because the files that they still have to remove would stay in
    ``/dev/shm``. A tracker exits once no process holds its pipe, so it exits at the latest after all other
    children. This function has no timeout, because the agent limits the total time of the imports.
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
    """Return true if the process is a resource tracker of ``multiprocessing`` or of ``loky``."""
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"resource_tracker" in file.read()
