"""The full name of this machine, asked for once and not for long.

Torch asks the resolver for every event. Where the name server is gone, that takes seconds each time, in the
loop that watches the workers.
"""

from __future__ import annotations

import os
import socket
import threading

PATIENCE = 1.0
"""Seconds that the resolver gets."""

_lock = threading.Lock()
_known: dict[int, str] = {}


def fq_hostname() -> str:
    """The name that the resolver gives this machine, or the kernel's when that takes too long; always the
    same one in a process.
    """
    with _lock:
        # A child made by fork may be in another network.
        pid = os.getpid()
        if pid not in _known:
            _known.clear()
            _known[pid] = _ask(PATIENCE)
        return _known[pid]


def _ask(patience: float) -> str:
    found: list[str] = []
    # A daemon: a resolver that hangs does not keep the process.
    asker = threading.Thread(target=lambda: found.append(socket.getfqdn()), name="fq-hostname", daemon=True)
    asker.start()
    asker.join(patience)
    return found[0] if found else os.uname().nodename
