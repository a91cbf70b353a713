"""Several agents → the first lines of all their workers."""

import random
import time

from benchmarks.harness import Launcher, Options, Row, Samples, take_turns, time_box, worker
from benchmarks.nodes import Shape, job

BOX_S = 2.0


def measure(options: Options) -> list[Row]:
    return [
        *_measure(options, Shape(2, 2), is_joined_late=True),
        *_measure(options, Shape(4, 1), is_joined_late=True),
        *_measure(options, Shape(4, 1), is_joined_late=False),
    ]


def _measure(options: Options, shape: Shape, is_joined_late: bool) -> list[Row]:
    samples = Samples(options)
    rng = random.Random(3)

    def sample(launcher: Launcher) -> None:
        with job(launcher, shape, worker("first_line.py")) as agents:
            if is_joined_late:
                agents.start_waiting(shape.nodes - 1)
                # Torchrun polls every second: it is to be hit at a random point of that.
                time.sleep(rng.uniform(0.2, 1.2))
                last = agents.start()
            else:
                last = agents.start(shape.nodes)
            stamps = [report.at_ns for report in agents.running()]
            samples.add(launcher, (max(stamps) - last.started_ns) / 1e6)

    def one(launcher: Launcher) -> None:
        for _ in time_box(BOX_S, options.repeats(5, 1)):
            sample(launcher)

    take_turns(options, options.repeats(3, 1), one)
    name = "the others wait" if is_joined_late else "all at once"
    conditions = f"{shape}, plain Python, from before fork of the last agent to the last worker's first line"
    return samples.rows(f"nodes: {shape.nodes} agents rendezvous, {name}", "ms", conditions)
