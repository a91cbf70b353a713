"""Reports its first line, and again when torch has been imported; then waits to be killed."""

import time

FIRST_LINE_NS = time.monotonic_ns()

import signal  # noqa: E402

import torch  # noqa: E402
from report import report  # noqa: E402

report("first-line", FIRST_LINE_NS)
report("torch-imported")
assert torch.distributed.is_available()
signal.pause()
