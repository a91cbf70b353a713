"""Time from the start of several agents to the first lines of all their workers."""

import random
import time
from collections.abc import Callable, Sequence

from benchmarks.harness import Launcher, Options, Row, Samples, take_turns, time_box, worker
from benchmarks.nodes import Shape, job

BOX_S = 2.0


def measure(options: Options) -> list[Row]:
    return [
        *measure_shape(options, Shape(2, 2), is_joined_late=True),
        *measure_shape(options, Shape(4, 1), is_joined_late=True),
        *measure_shape(options, Shape(4, 1)),
    ]


def measure_shape(
    options: Options,
    shape: Shape,
    *,
    is_joined_late: bool = False,
    meet: Callable[[Launcher], Sequence[str]] = lambda _: (),
    where: str = "",
) -> list[Row]:
    """Measure a start of all agents at once, or a start of the last agent while the others wait.

    Args:
        options: of the command line.
        shape: of the job.
        is_joined_late: the last one starts later; only with a store at an agent.
        meet: the options that say where a launcher's agents meet; at an agent without any.
        where: the same in words.
    """
    samples = Samples(options)
    rng = random.Random(3)

    def sample(launcher: Launcher) -> None:
        with job(launcher, shape, *meet(launcher), worker("first_line.py")) as agents:
            if is_joined_late:
                agents.start_waiting(shape.nodes - 1)
                # Start at a random point of torchrun's polling interval of one second.
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
    return samples.rows(f"nodes{where}: {shape.nodes} agents rendezvous, {name}", "ms", conditions)
