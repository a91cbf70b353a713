"""Time from the start of the launcher to the first line of the worker script."""

from benchmarks.harness import Launcher, Options, Row, Samples, run, take_turns, worker

N = 4


def measure(options: Options) -> list[Row]:
    first, last = Samples(options), Samples(options)

    def one(launcher: Launcher) -> None:
        with run(launcher, "--nproc-per-node", str(N), worker("first_line.py")) as running:
            stamps = [report.at_ns for report in running.reports.take("first-line", N)]
            first.add(launcher, (min(stamps) - running.started_ns) / 1e6)
            last.add(launcher, (max(stamps) - running.started_ns) / 1e6)

    take_turns(options, options.repeats(20, 3), one)
    conditions = f"N = {N}, plain Python worker, idle machine, from before fork of the launcher"
    return [
        *first.rows("launch: first worker's first line", "ms", conditions),
        *last.rows("launch: last worker's first line", "ms", conditions),
    ]
