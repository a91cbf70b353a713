"""Runs a program and reaps the processes that it leaves behind, as a machine's init process does.

Without it, orphans of the program become zombies of the tests' process, and a program that waits until a
process group is empty would wait for them.
"""

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    program = subprocess.Popen(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: program.terminate())
    while True:
        pid, status = os.wait()
        if pid == program.pid:
            program.returncode = os.waitstatus_to_exitcode(status)
            return program.returncode


if __name__ == "__main__":
    sys.exit(main())
