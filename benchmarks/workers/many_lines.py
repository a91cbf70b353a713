"""Writes many lines as fast as possible, with one write per line or per block, and reports its CPU time."""

import os
import resource
import sys

from report import report

lines, line_bytes, lines_per_write = map(int, sys.argv[1:])
block = (b"x" * (line_bytes - 1) + b"\n") * lines_per_write
for _ in range(lines // lines_per_write):
    rest = block
    while rest:
        rest = rest[os.write(1, rest) :]
used = resource.getrusage(resource.RUSAGE_SELF)
report("cpu", int((used.ru_utime + used.ru_stime) * 1e9))
