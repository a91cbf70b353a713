"""Detects that an attempt failed because another process was using its port."""

from __future__ import annotations

from elasticrs._engine.workers.logs import last_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs._engine.supervise.attempts.attempt import Attempt

_MAX_BYTES = 65536


def is_port_conflict(attempt: Attempt) -> bool:
    """Return true if the attempt failed because the workers' store could not bind the port that was reserved
    for it.

    Search the error files and stderr logs of the failed workers for the port number and the kernel's message
    about a port in use. Ignore ports that the user has chosen.
    """
    held = attempt.plan.port
    if held is None or held.store is not None:
        return False
    port = str(attempt.plan.master_port).encode()
    for worker in attempt.failed_exits():
        if worker.sent_signal is not None:
            continue
        for files in (attempt.paths.error_files, attempt.paths.stderrs):
            path = files.get(worker.local_rank, "")
            text = last_bytes(path, _MAX_BYTES).lower() if path.endswith((".json", ".log")) else b""
            if port in text and (b"eaddrinuse" in text or b"address already in use" in text):
                return True
    return False
