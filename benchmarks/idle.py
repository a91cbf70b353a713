"""An agent with 64 tee'd workers and nothing to do: what it takes."""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import Launcher, Options, Row, Run, Samples, run, take_turns, worker

N = 64


class Use(NamedTuple):
    """What a set of processes has used so far."""

    cpu_ns: int
    wakeups: int
    threads: int
    rss_mb: float


def measure(options: Options) -> list[Row]:
    seconds = options.repeats(20, 3)
    rss, cpu, wakeups, threads = (Samples(options) for _ in range(4))

    def one(launcher: Launcher) -> None:
        with run(
            launcher, "--nproc-per-node", str(N), "--tee", "3", "--no-python", worker("idle.sh")
        ) as running:
            running.reports.take("ready", N)
            time.sleep(2.0)  # until what belongs to the start is over
            pids = own_processes(running)
            before = use(pids)
            time.sleep(seconds)
            after = use(pids)
        rss.add(launcher, after.rss_mb)
        cpu.add(launcher, (after.cpu_ns - before.cpu_ns) / 1e7 / seconds)
        wakeups.add(launcher, (after.wakeups - before.wakeups) / seconds)
        threads.add(launcher, after.threads)

    take_turns(options, options.repeats(3, 1), one)
    conditions = f"{N} idle workers with --tee 3, {seconds} s, launcher and its own helpers together"
    return [
        *rss.rows("idle: resident size", "MB", conditions),
        *cpu.rows("idle: CPU of one core", "%", conditions),
        *wakeups.rows("idle: wake-ups per second", "1/s", conditions),
        *threads.rows("idle: threads", "", conditions),
    ]


def own_processes(running: Run) -> list[int]:
    """The launcher, and what it runs besides the workers: whatever below it is not `sleep`."""
    pids = [running.process.pid]
    for pid in pids:
        pids += [child for child in _children(pid) if _name(child) != "sleep"]
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
    """The numeric fields of a status file; sizes are in kB."""
    fields = (line.partition(":") for line in path.read_text(encoding="utf-8").splitlines())
    return {
        name: int(value.split()[0])
        for name, _, value in fields
        if value.split()[:1] and value.split()[0].isdigit()
    }


def _children(pid: int) -> list[int]:
    tasks = os.listdir(f"/proc/{pid}/task")
    texts = (Path(f"/proc/{pid}/task/{tid}/children").read_text(encoding="ascii") for tid in tasks)
    return [int(child) for text in texts for child in text.split()]


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
