"""What a process is doing, as the kernel says."""

from __future__ import annotations

__all__ = ["is_uninterruptible_state", "read_proc_state"]


def read_proc_state(pid: int) -> str | None:
    """The letter of a process's state, such as ``R``, ``S``, ``D`` or ``Z``; ``None`` when it cannot be read.

    Args:
        pid: of the process.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name of the program, in brackets before it, may hold anything.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0] if fields else None


def is_uninterruptible_state(state: str | None) -> bool:
    """Whether a process in this state cannot be killed before the kernel lets it go on."""
    return state is not None and state.startswith("D")
