"""Installs a signal handler that writes the stacks of all threads when the agent requests them. Used in
workers that do not load ``hook/sitecustomize.py``.

The agent sends a real-time signal before it kills a hung worker. ``faulthandler`` then writes the stacks of
all threads to a file beside the error file. ``hook/sitecustomize.py`` does the same.
"""

from __future__ import annotations

import os


def answer_with_stacks() -> None:
    """Register the signal handler if this process runs under an elasticrs agent and the signal has no handler
    yet.

    ``ELASTICRS_TRACEBACKS=0`` disables the handler.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    is_off = os.environ.get("ELASTICRS_TRACEBACKS") == "0"
    if not path or is_off or "ELASTICRS_ROUND" not in os.environ:
        return
    import faulthandler
    from _signal import SIGRTMIN  # type: ignore[import-not-found]

    signum = SIGRTMIN + 12
    if _is_caught(signum):
        return
    from elasticrs._engine.inside.error_file import may_be_replaced

    if not may_be_replaced(path):
        return  # The error file is a device such as /dev/null, so create no file next to it.
    try:
        descriptor = os.open(path + ".fault", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError:
        return  # Ignore the error, because only the stacks will be missing from the report.
    faulthandler.register(signum, descriptor, all_threads=True)


def _is_caught(signum: int) -> bool:
    try:
        with open("/proc/self/status", "rb") as file:
            masks = [line for line in file if line.startswith((b"SigCgt:", b"SigIgn:"))]
    except OSError:
        # Return true, so that no handler is installed. Without `/proc`, the agent would never request stacks,
        # because it could not see whether the worker has a handler.
        return True
    return any(int(mask.split()[1], 16) >> (signum - 1) & 1 for mask in masks)
