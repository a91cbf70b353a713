"""Time from the loss of a node until the workers of the other nodes are signalled. The node's agent is killed
with SIGKILL, or becomes silent.

Waiting for what never happens needs an end: a figure "> n" says that nothing had happened after n.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.harness import Launcher, Options, Row, Samples, take_turns, time_box, worker
from benchmarks.nodes import Agent, Shape, job

SHAPE = Shape(nodes=3, nproc=1)
ARRIVED = "until SIGTERM has arrived in the last worker of the other nodes"

KEEP_ALIVE_2_S = {
    "torchrun": ("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=2"),  # whole seconds only
    "elasticrs": ("--rdzv-conf", "keep_alive_interval=0.4,keep_alive_max_attempt=5"),
}


class Loss:
    """One way to lose a node, and the measured times."""

    def __init__(self, options: Options, lose: Callable[[Agent], int], limit_s: int) -> None:
        self.samples = Samples(options)
        self._lose = lose
        self._limit_s = limit_s
        self._rng = random.Random(5)

    def sample(
        self, launcher: Launcher, arguments: Sequence[str] = (), *, is_hosted_by_first: bool = True
    ) -> None:
        """Start a job, lose one of its nodes, and measure the time until the other workers are signalled.

        Args:
            launcher: of the agents.
            arguments: more options for each agent.
            is_hosted_by_first: true if the first agent hosts the store. It is started first and never lost.
        """
        with job(launcher, SHAPE, *arguments, worker("first_line.py")) as agents:
            if is_hosted_by_first:
                agents.start_all()
            else:
                agents.start(SHAPE.nodes)
            running = agents.running()
            time.sleep(self._rng.uniform(0.2, 0.4))
            victim = self._rng.choice(agents.agents[is_hosted_by_first:])
            peers = {each.pid for each in running if agents.agent_of(each) is not victim}
            lost_ns = self._lose(victim)
            try:
                arrivals = agents.reports.take("terminated", len(peers), pids=peers, timeout=self._limit_s)
            except TimeoutError:
                self.samples.add_limit(launcher, self._limit_s * 1e3)
            else:
                self.samples.add(launcher, (max(each.at_ns for each in arrivals) - lost_ns) / 1e6)


def measure_killed(
    options: Options, meet: Callable[[Launcher], Sequence[str]] | None = None, where: str = ""
) -> list[Row]:
    """Measure the loss of nodes whose agents are killed with SIGKILL.

    Args:
        options: of the command line.
        meet: options for where the agents of a launcher meet; ``None`` for a store at the first agent.
        where: the same in words.
    """
    loss = Loss(options, Agent.kill, limit_s=options.repeats(20, 3))

    def one(launcher: Launcher) -> None:
        for _ in time_box(12.0, options.repeats(25, 2)):
            loss.sample(launcher, meet(launcher) if meet else (), is_hosted_by_first=meet is None)

    take_turns(options, 1, one)
    victim = "any agent" if meet else "an agent that is not the store's host"
    conditions = f"{SHAPE}, from before SIGKILL of {victim} {ARRIVED}"
    name = f"nodes{where}: agent killed, SIGTERM in the peers' workers"
    return [
        *loss.samples.rows(f"{name}, p50", "ms", conditions),
        *loss.samples.rows(f"{name}, max", "ms", conditions, max),
    ]


def measure_silent(options: Options) -> list[Row]:
    # The limit must exceed torchrun's default of 15 s, so that torchrun has time to react.
    default = "default keep-alive limit (15 s and 5 s)"
    rows = _silent(options, default, {}, limit_s=options.repeats(18, 6), seconds=8.0)
    if options.is_quick:
        return rows
    return _silent(options, "keep-alive limit 2 s", KEEP_ALIVE_2_S, limit_s=8, seconds=7.0) + rows


def _silent(
    options: Options, limit: str, arguments: Mapping[str, Sequence[str]], limit_s: int, seconds: float
) -> list[Row]:
    loss = Loss(options, Agent.silence, limit_s)

    def one(launcher: Launcher) -> None:
        for _ in time_box(seconds, options.repeats(4, 1)):
            loss.sample(launcher, arguments.get(launcher.name, ()))

    take_turns(options, 1, one)
    conditions = f"{SHAPE}, from before SIGSTOP of all processes of a node {ARRIVED}"
    return loss.samples.rows(f"nodes: silent host, {limit}, max", "ms", conditions, max)
