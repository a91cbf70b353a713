"""Reports its first line, waits for SIGUSR1 or SIGTERM, reports the signal, and exits."""

import time

FIRST_LINE_NS = time.monotonic_ns()

import os  # noqa: E402
import signal  # noqa: E402

from report import report  # noqa: E402

# Block the signals and wait for them, so that no Python signal handler delays the timestamp.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
report("first-line", FIRST_LINE_NS)
signum = signal.sigwait({signal.SIGTERM, signal.SIGUSR1})
arrived_ns = time.monotonic_ns()
report("terminated" if signum == signal.SIGTERM else "leaving", arrived_ns)
os._exit(0 if signum == signal.SIGUSR1 else 143)
