"""Signals at an agreed step, and the cost of the control socket and of the page."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from benchmarks.harness import (
    Launcher,
    Options,
    Reports,
    Row,
    Samples,
    percentile,
    run,
    take_turns,
    wait_readable,
    worker,
)
from benchmarks.idle import own_processes, use
from benchmarks.nodes import Shape, job
from benchmarks.procs import tree
from elasticrs._engine.cli.control_client import Agent, Connection

STOP_LIMIT = 10.0
"""Seconds after which a job counts as hung that was stopped."""

STEPS = 20_000  # as in workers/agreed.py
NODES = Shape(nodes=3, nproc=1)
RANKS = 256


def measure(options: Options) -> list[Row]:
    ours = options._replace(launchers=tuple(each for each in options.launchers if each.name == "elasticrs"))
    return [
        *_stops(options),
        *_requests(ours, 2),
        *_requests(ours, 8),
        *_requests_of_nodes(ours),
        *_look(ours),
        *_program(ours, "import in a worker", "ms", IMPORT, "the hook's modules, after those of torch"),
        *_program(ours, "open the control socket", "ms", OPEN, "CPU of the agent's main thread"),
        *_page(ours),
    ]


def _stops(options: Options) -> list[Row]:
    hangs = Samples(options)
    moments = random.Random(5)

    def one(launcher: Launcher) -> None:
        with run(launcher, "--nproc-per-node", "2", worker("agreed.py")) as running:
            running.reports.take("begun", 2)
            time.sleep(moments.uniform(0.0, 0.1))
            running.process.send_signal(signal.SIGTERM)
            is_hung = not wait_readable(running.pidfd, STOP_LIMIT)
            hangs.add(launcher, 100.0 * is_hung)
            for pid in tree(running.process.pid) if is_hung else ():
                os.kill(pid, signal.SIGKILL)

    take_turns(options, options.repeats(20, 2), one)
    conditions = f"2 ranks, which save in their handlers; hung: it runs on after {STOP_LIMIT:g} s"
    return hangs.rows(
        "operate: jobs that hang on a SIGTERM", "%", conditions, lambda values: sum(values) / len(values)
    )


@contextmanager
def _sockets() -> Iterator[str]:
    """Let the agents that are started in the block open their sockets in a new folder."""
    with TemporaryDirectory(prefix="bench-") as folder:
        os.environ["ELASTICRS_CONTROL_DIR"] = folder
        try:
            yield folder
        finally:
            del os.environ["ELASTICRS_CONTROL_DIR"]


class Requests:
    """Times of requests for a checkpoint, over the control socket of an agent."""

    def __init__(self, options: Options) -> None:
        self._took, self._stood, self._count = Samples(options), Samples(options), options.repeats(100, 3)

    def make(self, launcher: Launcher, reports: Reports, agent: Agent, ranks: int) -> None:
        reports.take("begun", ranks)
        for _ in range(self._count):
            time.sleep(random.uniform(0.1, 0.15))
            asked = time.monotonic_ns()
            (answer,) = agent.ask({"do": "checkpoint"}, 30.0)
            if answer["step"] is None:
                raise RuntimeError(f"no agreed step: {answer['message']}")
            acted = max(each.at_ns for each in reports.take("acted", ranks))
            self._took.add(launcher, (acted - asked) / 1e6)
            self._stood.add(launcher, *(each.at_ns / 1e6 for each in reports.take("stood", ranks)))

    def rows(self, name: str, conditions: str) -> list[Row]:
        def p95(values: Sequence[float]) -> float:
            return percentile(values, 95)

        about = f"{conditions}, steps of 4 ms and their all-reduce"
        return [
            *self._took.rows(f"operate: request → all acted, {name}, p50", "ms", about),
            *self._took.rows(f"operate: request → all acted, {name}, p95", "ms", about, p95),
            *self._stood.rows(f"operate: ranks wait, {name}, p95", "ms", about, p95),
        ]


def _requests(options: Options, ranks: int) -> list[Row]:
    requests = Requests(options)

    def one(launcher: Launcher) -> None:
        with (
            _sockets() as folder,
            run(launcher, "--nproc-per-node", str(ranks), worker("agreed.py")) as running,
        ):
            agent = Agent(running.process.pid, f"{folder}/{running.process.pid}.sock", None)
            requests.make(launcher, running.reports, agent, ranks)

    take_turns(options, 1, one)
    return requests.rows(f"{ranks} ranks", "one node")


def _requests_of_nodes(options: Options) -> list[Row]:
    requests = Requests(options)

    def one(launcher: Launcher) -> None:
        with _sockets() as folder, job(launcher, NODES, worker("agreed.py")) as agents:
            agents.start_all()
            pid = agents.agents[-1].process.pid
            requests.make(launcher, agents.reports, Agent(pid, f"{folder}/{pid}.sock", None), NODES.size)

    take_turns(options, 1, one)
    return requests.rows("3 nodes", str(NODES))


def _look(options: Options) -> list[Row]:
    samples = Samples(options)

    def one(launcher: Launcher) -> None:
        with run(launcher, worker("agreed.py"), "look") as running:
            bare, hooked = (
                min(each.at_ns for each in running.reports.take(name, 5)) for name in ("bare", "hooked")
            )
            samples.add(launcher, (hooked - bare) / STEPS)

    take_turns(options, options.repeats(5, 1), one)
    conditions = f"added to each of {STEPS} steps of an SGD optimizer; the best of 5 turns in each job"
    return samples.rows("operate: look in the hook, p50", "ns", conditions)


IMPORT = """
import sys, time, torch.optim
begun = time.thread_time()
from elasticrs._engine.inside import boundary
boundary.follow_steps(sys.modules["torch.optim.optimizer"], lambda number: None)
print(1e3 * (time.thread_time() - begun))
"""

OPEN = """
import sys, time
from elasticrs._engine.supervise.run import loop
open_control = loop.Agent._open_control
def timed(agent):
    begun = time.thread_time()
    open_control(agent)
    print(1e3 * (time.thread_time() - begun))
loop.Agent._open_control = timed
from elasticrs.launch import main
sys.argv[1:] = ["--no-python", "true"]
sys.exit(main())
"""


def _program(options: Options, name: str, unit: str, source: str, conditions: str) -> list[Row]:
    """Measure with a program that prints a figure."""
    samples = Samples(options)

    def one(launcher: Launcher) -> None:
        with _sockets():
            command = [sys.executable, "-c", source]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        samples.add(launcher, float(done.stdout))

    take_turns(options, options.repeats(20, 2), one)
    return samples.rows(f"operate: {name}, p50", unit, conditions)


def _page(options: Options) -> list[Row]:
    cpu, sent = Samples(options), Samples(options)
    seconds = options.repeats(20, 3)

    def one(launcher: Launcher) -> None:
        arguments = ("--nproc-per-node", str(RANKS), "--no-python", worker("idle.sh"))
        with _sockets() as folder, run(launcher, *arguments) as running:
            running.reports.take("ready", RANKS)
            page = _open_page(f"{folder}/{running.process.pid}.sock")
            _received(page, 2.0)
            before = use(own_processes(running.process.pid))
            size = _received(page, seconds)
            after = use(own_processes(running.process.pid))
            page.close()
            cpu.add(launcher, (after.cpu_ns - before.cpu_ns) / 1e7 / seconds)
            sent.add(launcher, size / 1e3 / seconds)

    take_turns(options, options.repeats(3, 1), one)
    conditions = f"{RANKS} idle ranks on one node, one browser, {seconds} s"
    return [
        *cpu.rows("operate: one open page, CPU of one core", "%", conditions),
        *sent.rows("operate: one open page, sent", "kB/s", conditions),
    ]


def _open_page(path: str) -> socket.socket:
    """Ask for the texts of the page, as a browser does, and return the connection."""
    connection = Connection(path, 5.0)
    connection.request("GET", "/status/stream")
    return connection.sock


def _received(stream: socket.socket, seconds: float) -> int:
    """Read for some seconds, and return the number of bytes."""
    until, size = time.monotonic() + seconds, 0
    while (left := until - time.monotonic()) > 0:
        if wait_readable(stream.fileno(), left):
            size += len(stream.recv(1 << 16))
    return size
