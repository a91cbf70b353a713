"""Helpers for processes other than the workers: run modules of this package, and read ``/proc``."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` would import more modules
import os
import sys

# Put this package's folder first, because another release of the package may be installed.
_PROGRAM = """\
import sys
sys.path.insert(0, sys.argv.pop(1))
import elasticrs
sys.path.append(sys.path.pop(0))
from {module} import main
sys.exit(main(*sys.argv[1:]))
"""


def command(module: str, *arguments: str) -> list[str]:
    """Return a command that runs a module's ``main``. It ignores ``PYTHONPATH`` and the working directory."""
    import elasticrs

    root = os.path.dirname(elasticrs.__path__[0])
    return [sys.executable, "-I", "-S", "-c", _PROGRAM.format(module=module), root, *arguments]


def main() -> int:
    """Kill a process group as soon as the program that started this one dies, even by SIGKILL. The starter
    writes the group's number to this process's standard input, and keeps the pipe open. A starter that ends
    the group itself kills this process first, because another group may get the number afterwards. If a
    starter dies before it writes the number, the group continues to run.
    """
    group = b""
    while part := os.read(0, 64):
        group += part
    try:
        if group:
            os.killpg(int(group), _signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return 0  # The group no longer exists, or its processes belong to another user.
    return 0


def has_own_proc() -> bool:
    """Return true if ``/proc`` shows the pids of this process's own pid namespace, not of an outer one."""
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
