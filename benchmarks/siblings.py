"""Time from SIGKILL of a worker until its siblings are signalled, and until the restarted workers run."""

import os
import random
import signal
import time
from collections.abc import Sequence

from benchmarks.harness import (
    Launcher,
    Options,
    Row,
    Run,
    Samples,
    percentile,
    run,
    stamped,
    take_turns,
    worker,
)

N = 8
KILLS_PER_LAUNCH = 25


def kill_one(running: Run, rng: random.Random, attempt: int, n: int) -> int:
    """Wait until all workers run and are idle, then kill one. Return the time just before."""
    reports = running.reports.take("first-line", n, attempt)
    # Wait until all Python processes have started, plus a random time, because some launchers poll.
    time.sleep(rng.uniform(0.2, 0.4))
    victim = rng.choice(reports).pid
    killed_ns = time.monotonic_ns()
    os.kill(victim, signal.SIGKILL)
    return killed_ns


def measure(options: Options) -> list[Row]:
    first, last, sent = Samples(options), Samples(options), Samples(options)
    rng = random.Random(1)
    kills = options.repeats(KILLS_PER_LAUNCH, 5)

    def one(launcher: Launcher) -> None:
        arguments = ("--nproc-per-node", str(N), "--max-restarts", str(kills), worker("first_line.py"))
        with run(stamped(launcher), *arguments) as running:
            killed = {}
            for attempt in range(kills):
                killed[attempt] = killed_ns = kill_one(running, rng, attempt, N)
                stamps = [report.at_ns for report in running.reports.take("terminated", N - 1, attempt)]
                first.add(launcher, (min(stamps) - killed_ns) / 1e6)
                last.add(launcher, (max(stamps) - killed_ns) / 1e6)
            running.stop()
            signalled = running.signalled()
            sent.add(launcher, *((signalled[attempt] - killed[attempt]) / 1e6 for attempt in signalled))

    take_turns(options, options.repeats(8, 2), one)
    arrived = f"N = {N}, idle machine, until SIGTERM has arrived in"
    # Use the launcher's timestamp, because it excludes the startup of workers on few cores. torchrun has no
    # timestamp to compare.
    returned = f"N = {N}, idle machine, until the last kill has returned in the launcher"
    rows = first.rows("kill: SIGTERM in the first sibling, p50", "ms", f"{arrived} the first sibling")
    for percent in (50, 99):

        def pick(values: Sequence[float], percent: int = percent) -> float:
            return percentile(values, percent)

        rows += last.rows(
            f"kill: SIGTERM in all siblings, p{percent}", "ms", f"{arrived} the last sibling", pick
        )
        rows += sent.rows(f"kill: all siblings signalled, p{percent}", "ms", returned, pick)
    return rows
