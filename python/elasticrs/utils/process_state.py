"""The state of a process, from the kernel."""

from __future__ import annotations

__all__ = ["is_uninterruptible_state", "read_proc_state"]


def read_proc_state(pid: int) -> str | None:
    """The letter of a process's state, such as ``R``, ``S``, ``D`` or ``Z``; ``None`` when it cannot be read.

    Args:
        pid: of the process.
    """
    from elasticrs.agent.sleepers import read_state

    return read_state(pid) or None


def is_uninterruptible_state(state: str | None) -> bool:
    """Return true if a process in this state cannot be killed until the kernel lets it continue."""
    return state is not None and state.startswith("D")
