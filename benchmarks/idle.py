"""Resource use of idle agents: one with 64 workers whose output is tee'd, and two in one job."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import Launcher, Options, Row, Samples, run, take_turns, worker
from benchmarks.nodes import Shape, job
from benchmarks.procs import children

N = 64
NODES = Shape(nodes=2, nproc=2)


class Use(NamedTuple):
    """Resources that a set of processes has used so far."""

    cpu_ns: int
    wakeups: int
    threads: int
    rss_mb: float


class Figures:
    def __init__(self, options: Options) -> None:
        self._rss, self._cpu, self._wakeups, self._threads = (Samples(options) for _ in range(4))

    def add(self, launcher: Launcher, before: Use, after: Use, seconds: float) -> None:
        self._rss.add(launcher, after.rss_mb)
        self._cpu.add(launcher, (after.cpu_ns - before.cpu_ns) / 1e7 / seconds)
        self._wakeups.add(launcher, (after.wakeups - before.wakeups) / seconds)
        self._threads.add(launcher, after.threads)

    def rows(self, prefix: str, conditions: str) -> list[Row]:
        return [
            *self._rss.rows(f"{prefix}: resident size", "MB", conditions),
            *self._cpu.rows(f"{prefix}: CPU of one core", "%", conditions),
            *self._wakeups.rows(f"{prefix}: wake-ups per second", "1/s", conditions),
            *self._threads.rows(f"{prefix}: threads", "", conditions),
        ]


def measure(options: Options) -> list[Row]:
    seconds = options.repeats(20, 3)
    figures = Figures(options)

    def one(launcher: Launcher) -> None:
        with run(
            launcher, "--nproc-per-node", str(N), "--tee", "3", "--no-python", worker("idle.sh")
        ) as running:
            running.reports.take("ready", N)
            _watch({running.process.pid: figures}, launcher, seconds)

    take_turns(options, options.repeats(3, 1), one)
    conditions = f"{N} idle workers with --tee 3, {seconds} s, launcher and its own helpers together"
    return figures.rows("idle", conditions)


def measure_nodes(options: Options) -> list[Row]:
    seconds = options.repeats(8, 3)
    of_host, of_other = Figures(options), Figures(options)

    def one(launcher: Launcher) -> None:
        with job(launcher, NODES, "--no-python", worker("idle.sh")) as agents:
            agents.start_all()
            agents.reports.take("ready", NODES.size)
            host, other = (agent.process.pid for agent in agents.agents)
            _watch({host: of_host, other: of_other}, launcher, seconds)

    take_turns(options, 1, one)
    conditions = f"{NODES}, idle, {seconds} s, one agent and its own helpers together"
    return [
        *of_host.rows("nodes: idle, agent with the store", conditions),
        *of_other.rows("nodes: idle, other agent", conditions),
    ]


def _watch(figures: Mapping[int, Figures], launcher: Launcher, seconds: float) -> None:
    """Measure the resource use of these launchers while they are idle."""
    time.sleep(2.0)  # wait until the launcher's startup is over
    pids = {pid: own_processes(pid) for pid in figures}
    before = {pid: use(pids[pid]) for pid in figures}
    time.sleep(seconds)
    for pid, each in figures.items():
        each.add(launcher, before[pid], use(pids[pid]), seconds)


def own_processes(launcher: int) -> list[int]:
    """Return the launcher and its helper processes. Workers run `sleep`, so all descendants with another name
    are helpers.
    """
    pids = [launcher]
    for pid in pids:
        pids += [child for child in children(pid) if _name(child) != "sleep"]
    return pids


def use(pids: Iterable[int]) -> Use:
    cpu_ns = wakeups = threads = 0
    rss_mb = 0.0
    for pid in pids:
        rss_mb += _status(Path(f"/proc/{pid}/status"))["VmRSS"] / 1000
        for task in Path(f"/proc/{pid}/task").iterdir():
            threads += 1
            cpu_ns += int((task / "schedstat").read_text(encoding="ascii").split()[0])
            wakeups += _status(task / "status")["voluntary_ctxt_switches"]
    return Use(cpu_ns, wakeups, threads, rss_mb)


def _status(path: Path) -> dict[str, int]:
    """Return the numeric fields of a status file. Sizes are in kB."""
    fields = (line.partition(":") for line in path.read_text(encoding="utf-8").splitlines())
    return {
        name: int(value.split()[0])
        for name, _, value in fields
        if value.split()[:1] and value.split()[0].isdigit()
    }


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
