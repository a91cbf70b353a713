"""Read ``/proc``."""

from __future__ import annotations

import os


def has_own_proc() -> bool:
    """Return true if ``/proc`` shows the pid namespace of this process.

    Return false if ``/proc`` is not mounted or shows an outer namespace (``unshare --pid`` without
    ``--mount-proc``), in which the same pid belongs to a different process. The core applies the same rule.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            pids = next((line.split()[1:] for line in status if line.startswith("NSpid:")), [])
    except OSError:
        return False
    return pids == [str(os.getpid())]


def started_at(pid: str) -> int:
    """Return the start time of a process (a pid or ``self``) in clock ticks since boot; 0 if it cannot be
    read.
    """
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


def stat_fields(pid: str, proc: str = "/proc") -> list[bytes]:
    """Return the fields of ``/proc/PID/stat``, starting at the third field (the state). The list is empty if
    the file cannot be read.
    """
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            # Skip the second field, the name in parentheses, because it can contain any byte.
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def read_state(pid: int, proc: str = "/proc") -> str:
    """Return the letter for a process's state, or an empty string if it cannot be read."""
    fields = stat_fields(str(pid), proc)
    return fields[0].decode() if fields else ""
