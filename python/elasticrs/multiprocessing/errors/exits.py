"""Exit codes and signals in words."""

from __future__ import annotations

from elasticrs.texts import signal_name

__all__ = ["describe_exit", "signal_name"]


def describe_exit(exitcode: int | None) -> str:
    """How a process ended, in words.

    Args:
        exitcode: the exit code, the negative number of a signal, or ``None`` when nobody can tell.
    """
    if exitcode is None:
        return "unknown exit status"
    if exitcode < 0:
        return signal_name(-exitcode)
    if 128 < exitcode < 128 + 65:
        return f"exit code {exitcode} (a shell's word for {signal_name(exitcode - 128)})"
    return f"exit code {exitcode}"
