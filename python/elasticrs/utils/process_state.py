"""Read the state of a process from ``/proc``."""

from __future__ import annotations

from elasticrs._engine.process.other_processes import read_state

__all__ = ["is_uninterruptible_state", "read_proc_state"]


def read_proc_state(pid: int) -> str | None:
    """Return a process's state, such as ``R``, ``S``, ``D`` or ``Z``; ``None`` if it cannot be read."""
    return read_state(pid) or None


def is_uninterruptible_state(state: str | None) -> bool:
    """Return true for uninterruptible sleep, in which a process cannot be killed."""
    return state is not None and state.startswith("D")
