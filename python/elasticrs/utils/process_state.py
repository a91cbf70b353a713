"""The state of a process, from the kernel."""

from __future__ import annotations

__all__ = ["is_uninterruptible_state", "read_proc_state"]

PROC = "/proc"


def read_proc_state(pid: int) -> str | None:
    """The letter of a process's state, such as ``R``, ``S``, ``D`` or ``Z``; ``None`` when it cannot be read.

    Args:
        pid: of the process.
    """
    return read_state(pid) or None


def is_uninterruptible_state(state: str | None) -> bool:
    """Return true if a process in this state cannot be killed until the kernel lets it continue."""
    return state is not None and state.startswith("D")


def read_state(pid: int, proc: str = PROC) -> str:
    """The letter of a process's state; empty when it is not there.

    Args:
        pid: of the process.
        proc: where ``/proc`` is mounted.
    """
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        # It has ended.
        return ""
    # The name before it may hold anything, parentheses and spaces as well.
    return text.rpartition(b")")[2].split()[0].decode()
