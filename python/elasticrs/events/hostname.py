"""Resolves the fully qualified name of this machine, once per process and with a short time limit.

Torch calls the resolver for every event. While the name server is down, each call in torch blocks the loop
that monitors the workers for several seconds.
"""

from __future__ import annotations

import os
import socket
import threading

PATIENCE = 1.0
"""Time limit for the resolver, in seconds."""

_lock = threading.Lock()
_known: dict[int, str] = {}


def fq_hostname() -> str:
    """Return the fully qualified name of this machine from the resolver, or the kernel's host name if the
    resolver is too slow. Within a process, the result never changes.
    """
    with _lock:
        # Resolve the name again in a forked child, because it may be in another network namespace.
        pid = os.getpid()
        if pid not in _known:
            _known.clear()
            _known[pid] = _ask(PATIENCE)
        return _known[pid]


def _ask(patience: float) -> str:
    found: list[str] = []
    # Use a daemon thread, so that a hanging resolver does not keep the process alive.
    asker = threading.Thread(target=lambda: found.append(socket.getfqdn()), name="fq-hostname", daemon=True)
    asker.start()
    asker.join(patience)
    return found[0] if found else os.uname().nodename
