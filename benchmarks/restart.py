"""Time from SIGKILL of a worker to the first lines of the restarted workers, with plain workers and with
workers that import torch.
"""

import os
import random
import signal
import time

from benchmarks.harness import Launcher, Options, Row, Samples, run, take_turns, worker
from benchmarks.siblings import kill_one

N = 4


def measure_plain(options: Options, ranks: int = N) -> list[Row]:
    first, last = Samples(options), Samples(options)
    rng = random.Random(2)
    kills = options.repeats(20, 5)

    def one(launcher: Launcher) -> None:
        arguments = ("--nproc-per-node", str(ranks), "--max-restarts", str(kills), worker("first_line.py"))
        with run(launcher, *arguments) as running:
            for attempt in range(kills):
                killed_ns = kill_one(running, rng, attempt, ranks)
                # Do not remove the reports, because the next iteration waits for the same ones.
                reports = running.reports.peek("first-line", ranks, attempt + 1)
                stamps = [report.at_ns for report in reports]
                first.add(launcher, (min(stamps) - killed_ns) / 1e6)
                last.add(launcher, (max(stamps) - killed_ns) / 1e6)

    take_turns(options, options.repeats(3, 1), one)
    conditions = f"N = {ranks}, plain Python worker, idle machine"
    return [
        *first.rows("restart: first worker's first line", "ms", conditions),
        *last.rows("restart: last worker's first line", "ms", conditions),
    ]


def measure_torch(options: Options) -> list[Row]:
    lines, imported = Samples(options), Samples(options)

    def one(launcher: Launcher) -> None:
        arguments = ("--nproc-per-node", str(N), "--max-restarts", "1", worker("with_torch.py"))
        with run(launcher, *arguments) as running:
            victim = running.reports.take("torch-imported", N, 0)[0].pid
            killed_ns = time.monotonic_ns()
            os.kill(victim, signal.SIGKILL)
            usable = [report.at_ns for report in running.reports.take("torch-imported", N, 1)]
            stamps = [report.at_ns for report in running.reports.take("first-line", N, 1)]
            lines.add(launcher, (max(stamps) - killed_ns) / 1e6)
            imported.add(launcher, (max(usable) - killed_ns) / 1e6)

    take_turns(options, options.repeats(5, 1), one)
    conditions = f"N = {N}, worker that imports torch, idle machine"
    return [
        *lines.rows("restart with torch: last worker's first line", "ms", conditions),
        *imported.rows("restart with torch: torch imported in all", "ms", conditions),
    ]
