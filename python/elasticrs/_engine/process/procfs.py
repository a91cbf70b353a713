"""Read ``/proc``."""

from __future__ import annotations

import os


def has_own_proc() -> bool:
    """Return true if ``/proc`` shows the pid namespace of this process, not an outer one with other pids.

    The core applies the same rule.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            pids = next((line.split()[1:] for line in status if line.startswith("NSpid:")), [])
    except OSError:
        return False
    return pids == [str(os.getpid())]


def started_at(pid: str) -> int:
    """Return the start time of a process (a pid or ``self``) in clock ticks since boot; 0 if unreadable."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


def stat_fields(pid: str, proc: str = "/proc") -> list[bytes]:
    """Return the fields of ``/proc/PID/stat``, starting with the third (the state); empty if unreadable."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            # The second field, the name in parentheses, can contain any byte.
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def read_state(pid: int, proc: str = "/proc") -> str:
    fields = stat_fields(str(pid), proc)
    return fields[0].decode() if fields else ""
