"""Reports its first line, then ends on SIGUSR1 (and reports that as its last act)."""

import time

FIRST_LINE_NS = time.monotonic_ns()

import os  # noqa: E402
import signal  # noqa: E402

from report import report  # noqa: E402

# Waiting in the kernel, without a handler: the stamp is that of the arrival itself.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
report("first-line", FIRST_LINE_NS)
signum = signal.sigwait({signal.SIGTERM, signal.SIGUSR1})
arrived_ns = time.monotonic_ns()
report("terminated" if signum == signal.SIGTERM else "leaving", arrived_ns)
os._exit(0 if signum == signal.SIGUSR1 else 143)
