"""Time from SIGKILL of a worker until the workers of the other node are signalled, and until all workers run
again.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence

from benchmarks.harness import Launcher, Options, Row, Samples, percentile, take_turns, time_box, worker
from benchmarks.nodes import Shape, job

SHAPE = Shape(nodes=2, nproc=2)
MAX_KILLS = 100
BOX_S = 10.0


def measure(
    options: Options,
    meet: Callable[[Launcher], Sequence[str]] | None = None,
    where: str = "",
    shape: Shape = SHAPE,
) -> list[Row]:
    """Kill workers at random.

    Args:
        options: of the command line.
        meet: the options that say where a launcher's agents meet; at the first agent when ``None``.
        where: the same in words.
        shape: nodes and workers of the job.
    """
    signalled, restarted = Samples(options), Samples(options)
    rng = random.Random(4)
    kills = options.repeats(MAX_KILLS, 5)

    def one(launcher: Launcher) -> None:
        arguments = ("--max-restarts", str(kills), *(meet(launcher) if meet else ()))
        with job(launcher, shape, *arguments, worker("first_line.py")) as agents:
            if meet:
                agents.start(shape.nodes)
            else:
                agents.start_all()
            running = agents.running()
            for _ in time_box(BOX_S, kills):
                # Wait until all Python processes have started, plus a random time, because some launchers
                # poll every 0.1 s.
                time.sleep(rng.uniform(0.05, 0.2))
                victim = rng.choice(running)
                peers = {each.pid for each in running if agents.node_of(each) != agents.node_of(victim)}
                killed_ns = time.monotonic_ns()
                os.kill(victim.pid, signal.SIGKILL)
                arrivals = agents.reports.take("terminated", len(peers), pids=peers)
                running = agents.running()
                signalled.add(launcher, _ms(killed_ns, max(each.at_ns for each in arrivals)))
                restarted.add(launcher, _ms(killed_ns, max(each.at_ns for each in running)))

    take_turns(options, options.repeats(2, 1), one)
    conditions = f"{shape}, plain Python, from before the kill"
    rows: list[Row] = []
    for percent in (50, 99):

        def pick(values: Sequence[float], percent: int = percent) -> float:
            return percentile(values, percent)

        arrived = f"{conditions} until SIGTERM has arrived in the other node's last worker"
        rows += signalled.rows(
            f"nodes{where}: worker killed, SIGTERM in the peers' workers, p{percent}", "ms", arrived, pick
        )
    for percent in (50, 99):

        def pick(values: Sequence[float], percent: int = percent) -> float:
            return percentile(values, percent)

        rows += restarted.rows(
            f"nodes{where}: worker killed, all run again, p{percent}",
            "ms",
            f"{conditions} to the last worker's first line",
            pick,
        )
    return rows


def _ms(start_ns: int, end_ns: int) -> float:
    return (end_ns - start_ns) / 1e6
