"""SIGKILL of a worker → its siblings are signalled; and → the restarted workers run."""

import os
import random
import signal
import time

from benchmarks.harness import Launcher, Options, Row, Run, Samples, percentile, run, take_turns, worker

N = 8
KILLS_PER_LAUNCH = 25


def kill_one(running: Run, rng: random.Random, attempt: int, n: int) -> int:
    """Wait until all run and are at rest, kill one; returns the moment just before."""
    reports = running.reports.take("first-line", n, attempt)
    # A launcher that polls is hit at a random point of its interval; all Python start-ups are over by then.
    time.sleep(rng.uniform(0.2, 0.4))
    victim = rng.choice(reports).pid
    killed_ns = time.monotonic_ns()
    os.kill(victim, signal.SIGKILL)
    return killed_ns


def measure(options: Options) -> list[Row]:
    first, last = Samples(options), Samples(options)
    rng = random.Random(1)
    kills = options.repeats(KILLS_PER_LAUNCH, 5)

    def one(launcher: Launcher) -> None:
        arguments = ("--nproc-per-node", str(N), "--max-restarts", str(kills), worker("first_line.py"))
        with run(launcher, *arguments) as running:
            for attempt in range(kills):
                killed_ns = kill_one(running, rng, attempt, N)
                stamps = [report.at_ns for report in running.reports.take("terminated", N - 1, attempt)]
                first.add(launcher, (min(stamps) - killed_ns) / 1e6)
                last.add(launcher, (max(stamps) - killed_ns) / 1e6)

    take_turns(options, options.repeats(8, 2), one)
    conditions = f"N = {N}, idle machine, until SIGTERM has arrived in"
    return [
        *first.rows("kill: first sibling signalled, p50", "ms", f"{conditions} the first sibling"),
        *last.rows("kill: all siblings signalled, p50", "ms", f"{conditions} the last sibling"),
        *last.rows(
            "kill: all siblings signalled, p99",
            "ms",
            f"{conditions} the last sibling",
            lambda v: percentile(v, 99),
        ),
    ]
