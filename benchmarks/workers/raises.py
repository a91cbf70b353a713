"""Reports its first line, then waits. On SIGUSR1 the program fails in the way that its first argument names:
by an exception (``raise``) or by ``sys.exit(3)`` (``exit``). With a second argument, it first computes a
result with torch, and reports that.
"""

import time

FIRST_LINE_NS = time.monotonic_ns()

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402

from report import report  # noqa: E402

# Block the signals and wait for them, so that no Python signal handler delays the timestamp.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
how, *modules = sys.argv[1:]
if modules:
    import torch

    assert (torch.ones(8, 8) @ torch.ones(8, 8)).sum().item() == 512
    report("torch")
report("first-line", FIRST_LINE_NS)
signum = signal.sigwait({signal.SIGTERM, signal.SIGUSR1})
arrived_ns = time.monotonic_ns()
if signum == signal.SIGTERM:
    report("terminated", arrived_ns)
    os._exit(143)
report("raised")
if how == "exit":
    sys.exit(3)
raise ValueError("no such batch")
