"""Program that kills a process group as soon as the program that started the group dies, even if that program
is killed with SIGKILL.

The number of the group comes on standard input, which the starter keeps open. A starter that has ended the
group kills this program first, because the number may belong to another group afterwards. A starter that dies
in the moment between the start of the group and the message with its number leaves the group behind.
"""

from __future__ import annotations

import os
import signal


def main() -> int:
    """Wait until standard input is closed, and then kill the group. Return the exit code."""
    group = b""
    while part := os.read(0, 64):
        group += part
    try:
        if group:
            os.killpg(int(group), signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return 0  # The group no longer exists, or its processes belong to another user.
    return 0
