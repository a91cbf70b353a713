"""Workers' output on the launcher's console: latency, throughput and CPU cost."""

import os
import subprocess
import time

from benchmarks.harness import Launcher, Options, Row, Samples, percentile, run, take_turns, worker

LATENCY_RANKS = 4
RANKS = 8
LINES = 100_000
LINE_BYTES = 90


def measure_latency(options: Options) -> list[Row]:
    samples = Samples(options)
    lines = options.repeats(1500, 250)

    def one(launcher: Launcher) -> None:
        arguments = (
            "--nproc-per-node",
            str(LATENCY_RANKS),
            "--tee",
            "3",
            worker("stamped_lines.py"),
            str(lines),
        )
        reader, writer = os.pipe()
        with run(launcher, *arguments, stdout=writer) as running:
            os.close(writer)
            latencies = _latencies(reader)
            running.wait()
        if len(latencies) != LATENCY_RANKS * lines:
            raise RuntimeError(f"{launcher.name} lost lines: {len(latencies)} of {LATENCY_RANKS * lines}")
        samples.add(launcher, *latencies)

    take_turns(options, options.repeats(2, 1), one)
    conditions = (
        f"{LATENCY_RANKS} ranks, a line every 2 ms each, into a pipe, from before write to after read"
    )
    return [
        *samples.rows("tee: latency p50", "ms", conditions),
        *samples.rows("tee: latency p99", "ms", conditions, lambda values: percentile(values, 99)),
    ]


def _latencies(reader: int) -> list[float]:
    """Return the latency of each stamped line in milliseconds. Read until the pipe is closed."""
    found: list[float] = []
    rest = b""
    while chunk := os.read(reader, 1 << 16):
        now_ns = time.monotonic_ns()
        *lines, rest = (rest + chunk).split(b"\n")
        found += [(now_ns - int(line.rpartition(b" ")[2])) / 1e6 for line in lines if b"stamp " in line]
    os.close(reader)
    return found


def measure_throughput(options: Options) -> list[Row]:
    rows: list[Row] = []
    lines = options.repeats(LINES, LINES // 10)
    for shape, lines_per_write in (("a write for each line", 1), ("blocks of 64 KiB", 65536 // LINE_BYTES)):
        # Round down to whole blocks.
        rows += _throughput(options, shape, lines - lines % lines_per_write, lines_per_write)
    return rows


def _throughput(options: Options, shape: str, lines: int, lines_per_write: int) -> list[Row]:
    duration, added = Samples(options), Samples(options)

    def one(launcher: Launcher) -> None:
        shown_s, shown_cpu_s = _run_throughput(launcher, "--tee", lines, lines_per_write)
        _, kept_cpu_s = _run_throughput(launcher, "--redirects", lines, lines_per_write)
        duration.add(launcher, shown_s)
        added.add(launcher, shown_cpu_s - kept_cpu_s)

    take_turns(options, options.repeats(5, 1), one)
    conditions = f"{RANKS} ranks, {lines} lines of {LINE_BYTES} bytes each, {shape}, to /dev/null"
    return [
        *duration.rows(f"tee: {shape}, whole run", "s", f"{conditions}, launch to exit"),
        *added.rows(
            f"tee: {shape}, CPU added", "s", f"{conditions}, CPU of the launcher with tee minus redirect"
        ),
    ]


def _run_throughput(launcher: Launcher, flag: str, lines: int, lines_per_write: int) -> tuple[float, float]:
    """Return the seconds from launch to exit, and the CPU seconds of all processes except the workers."""
    command = (worker("many_lines.py"), str(lines), str(LINE_BYTES), str(lines_per_write))
    with run(
        launcher, "--nproc-per-node", str(RANKS), flag, "1", *command, stdout=subprocess.DEVNULL
    ) as running:
        workers_ns = sum(report.at_ns for report in running.reports.take("cpu", RANKS))
        gone_ns = running.wait()
        return (gone_ns - running.started_ns) / 1e9, running.usage_s - workers_ns / 1e9
