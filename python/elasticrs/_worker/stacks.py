"""Lets a worker answer the agent's question where it is, for workers in which the hook did not run.

The agent sends a real-time signal before it ends a hung worker; ``faulthandler`` answers by writing the
stacks of all threads into the file beside the error file. See ``hook/sitecustomize.py``, which does the same.
"""

from __future__ import annotations

import os


def answer_with_stacks() -> None:
    """Register the handler, unless there is one; under an agent of ours only.

    ``ELASTICRS_TRACEBACKS=0`` switches it off.
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
    from elasticrs._worker.error_file import may_be_replaced

    if not may_be_replaced(path):
        return  # Beside a device is no place for files.
    try:
        descriptor = os.open(path + ".fault", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError:
        return  # A report without stacks is no reason to disturb the worker.
    faulthandler.register(signum, descriptor, all_threads=True)


def _is_caught(signum: int) -> bool:
    try:
        with open("/proc/self/status", "rb") as file:
            masks = [line for line in file if line.startswith((b"SigCgt:", b"SigIgn:"))]
    except OSError:
        return True  # The agent could not tell either.
    return any(int(mask.split()[1], 16) >> (signum - 1) & 1 for mask in masks)
