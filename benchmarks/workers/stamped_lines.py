"""Writes lines that hold the moment they were written, at intervals of about two milliseconds."""

import os
import random
import sys
import time

lines = int(sys.argv[1])
rng = random.Random(int(os.environ["RANK"]))
for _ in range(lines):
    # The interval varies, so that no poller falls into step.
    time.sleep(rng.uniform(0.001, 0.003))
    os.write(1, b"stamp %d\n" % time.monotonic_ns())
