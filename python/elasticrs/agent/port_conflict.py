"""Finds out if an attempt failed because another process had its port."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.agent.attempt import Attempt

_MAX_BYTES = 65536


def is_port_conflict(attempt: Attempt) -> bool:
    """Return true if the workers' store could not have the port that was reserved for it.

    Judged by what the failed workers left in their error files or stderr logs: the port, and the kernel's
    words for a port in use. Ports that the user chose are his own affair.

    Args:
        attempt: that failed.
    """
    if attempt.plan.reserved is None or attempt.paths is None:
        return False
    port = str(attempt.plan.master_port).encode()
    for worker in attempt.failed_exits():
        if worker.sent_signal is not None:
            continue
        for files in (attempt.paths.error_files, attempt.paths.stderrs):
            text = _tail(files.get(worker.local_rank, "")).lower()
            if port in text and (b"eaddrinuse" in text or b"address already in use" in text):
                return True
    return False


def _tail(path: str) -> bytes:
    if not path.endswith((".json", ".log")):
        return b""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _MAX_BYTES))
            return file.read()
    except OSError:
        # A worker that did not fail in Python writes no error file; a broken disk tells nothing.
        return b""
