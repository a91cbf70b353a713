"""Check that ``/proc`` belongs to the pid namespace of this process."""

from __future__ import annotations

import os
from functools import cache


@cache
def has_own_proc() -> bool:
    """Return true if ``/proc`` shows the pid namespace of this process.

    Return false if ``/proc`` is not mounted or shows an outer namespace (``unshare --pid`` without
    ``--mount-proc``), in which the same pid belongs to a different process. The core applies the same rule.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            pids = next((line.split()[1:] for line in status if line.startswith("NSpid:")), [])
    except OSError:
        return False
    return pids == [str(os.getpid())]
