"""Read ``/proc``."""

from __future__ import annotations

import os


def has_own_proc() -> bool:
    """Return true if ``/proc`` shows the pid namespace of this process.

    It may show an outer one, with other pids.

    The core decides this in the same way.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            pids = next((line.split()[1:] for line in status if line.startswith("NSpid:")), [])
    except OSError:
        return False
    return pids == [str(os.getpid())]


def started_at(pid: str) -> int:
    """Return when a process (pid or ``self``) started, in clock ticks since boot; 0 if it cannot be read."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


def stat_fields(pid: str, proc: str = "/proc") -> list[bytes]:
    """Return the fields of ``/proc/PID/stat`` from the third (the state) on; empty if they cannot be read."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            # The second field, the name in parentheses, can contain any byte.
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def read_state(pid: int, proc: str = "/proc") -> str:
    fields = stat_fields(str(pid), proc)
    return fields[0].decode() if fields else ""
