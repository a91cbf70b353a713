"""Worker that reports its first line and then waits for a signal. On SIGUSR1, the worker fails in the way
that its argument names: with an uncaught exception (``raise``) or with ``sys.exit(3)`` (``exit``).
"""

import time

FIRST_LINE_NS = time.monotonic_ns()

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402

from report import report  # noqa: E402


def wait_and_fail() -> None:
    # Block the signals and wait for them, so that no Python signal handler delays the timestamp.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    report("first-line", FIRST_LINE_NS)
    signum = signal.sigwait({signal.SIGTERM, signal.SIGUSR1})
    arrived_ns = time.monotonic_ns()
    if signum == signal.SIGTERM:
        report("terminated", arrived_ns)
        os._exit(143)
    report("raised")
    if sys.argv[1] == "exit":
        sys.exit(3)
    raise ValueError("no such batch")


if __name__ == "__main__":
    wait_and_fail()
