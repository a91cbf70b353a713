"""Writes lines that contain the time of the write, about every two milliseconds."""

import os
import random
import sys
import time

lines = int(sys.argv[1])
rng = random.Random(int(os.environ["RANK"]))
for _ in range(lines):
    # Vary the interval, so that the lines do not fall into step with a poller.
    time.sleep(rng.uniform(0.001, 0.003))
    os.write(1, b"stamp %d\n" % time.monotonic_ns())
