"""Time from the exit of the last worker to the exit of the launcher."""

import os
import signal

from benchmarks.harness import Launcher, Options, Row, Samples, run, take_turns, worker

N = 4


def measure(options: Options) -> list[Row]:
    samples = Samples(options)

    def one(launcher: Launcher) -> None:
        with run(launcher, "--nproc-per-node", str(N), worker("first_line.py")) as running:
            for report in running.reports.take("first-line", N):
                os.kill(report.pid, signal.SIGUSR1)
            last_ns = max(report.at_ns for report in running.reports.take("leaving", N))
            samples.add(launcher, (running.wait() - last_ns) / 1e6)
            if running.process.returncode != 0:
                raise RuntimeError(f"{launcher.name} ended with {running.process.returncode}")

    take_turns(options, options.repeats(20, 3), one)
    conditions = f"N = {N}, all workers exit 0, idle machine, from the last one's _exit"
    return samples.rows("exit: launcher gone", "ms", conditions)
