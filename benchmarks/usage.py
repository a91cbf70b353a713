"""Duration of `--help`, the shortest task of a launcher."""

import subprocess
import time

from benchmarks.harness import Launcher, Options, Row, Samples, environment, take_turns


def measure(options: Options) -> list[Row]:
    samples = Samples(options)

    def one(launcher: Launcher) -> None:
        start = time.monotonic_ns()
        command = (*launcher.command, "--help")
        subprocess.run(command, stdout=subprocess.DEVNULL, env=environment(), check=True)
        samples.add(launcher, (time.monotonic_ns() - start) / 1e6)

    take_turns(options, options.repeats(20, 3), one)
    return samples.rows("--help", "ms", "idle machine, until it is gone")
