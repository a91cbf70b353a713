"""Reports its first line and the end of the import of torch, then waits to be killed."""

import time

FIRST_LINE_NS = time.monotonic_ns()

import signal  # noqa: E402

import torch  # noqa: E402
from report import report  # noqa: E402

report("first-line", FIRST_LINE_NS)
report("torch-imported")
assert torch.distributed.is_available()
signal.pause()
