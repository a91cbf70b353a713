"""The workers' end of the report channel; see benchmarks/harness.py."""

import os
import time


def report(event: str, at_ns: int | None = None) -> None:
    """Write one report with a single system call. ``at_ns`` defaults to the current time."""
    moment = time.monotonic_ns() if at_ns is None else at_ns
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    fd = os.open(os.environ["BENCH_REPORTS"], os.O_WRONLY)
    os.write(fd, f"{event} {rank} {attempt} {os.getpid()} {moment}\n".encode())
    os.close(fd)
