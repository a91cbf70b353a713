"""Benchmark of the cost of a verdict.

``make bench BENCH="--only nodes-verdict"`` measures the time from the last exit to the verdict on all nodes.
``python -m benchmarks.verdict`` measures the leader's decision about the failures of many nodes, and the
thread that waits for requests of the flight record.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

from benchmarks.harness import HANG, Launcher, Options, Row, Samples, take_turns, wait_readable, worker
from benchmarks.nodes import Shape, job
from elasticrs._engine.job.restart_policy import RestartSettings
from elasticrs._engine.nodes.protocol import round_outcome
from elasticrs._engine.nodes.protocol.leader_view import View
from elasticrs._engine.nodes.protocol.records import Head, Keys, Node, Slot, encode
from elasticrs._engine.nodes.transport.settings import Settings

SHAPE = Shape(nodes=3, nproc=2)
NOW = 1_700_000_000_000_000_000


def measure(options: Options) -> list[Row]:
    """Kill a worker of a job without restarts, and measure the time until its launchers exit."""
    # Leave out torchrun. Without a restart, its other nodes may not learn of the failure.
    options = options._replace(launchers=tuple(each for each in options.launchers if each.name != "torchrun"))
    samples = Samples(options)

    def one(launcher: Launcher) -> None:
        with job(launcher, SHAPE, "--max-restarts", "0", worker("first_line.py")) as agents:
            agents.start_all()
            running = agents.running()
            pidfds = [os.pidfd_open(agent.process.pid) for agent in agents.agents]
            for agent in agents.agents:
                agent.is_expected_to_run = False
            os.kill(running[0].pid, signal.SIGKILL)
            last_ns = max(report.at_ns for report in agents.reports.take("terminated", SHAPE.size - 1))
            gone = all(wait_readable(pidfd, HANG) for pidfd in pidfds)
            gone_ns = time.monotonic_ns()
            for pidfd in pidfds:
                os.close(pidfd)
            if not gone:
                raise TimeoutError("a launcher does not end")
            samples.add(launcher, (gone_ns - last_ns) / 1e6)

    take_turns(options, options.repeats(20, 5), one)
    conditions = (
        f"{SHAPE}, plain Python, one killed, from the last worker's _exit until all launchers are gone"
    )
    return samples.rows("nodes: verdict on all nodes", "ms", conditions)


class Entry(NamedTuple):
    """A key of the store."""

    key: str
    value: bytes | None
    create_revision: int
    mod_revision: int


def cause(rank: int) -> dict[str, object]:
    """Return a complete failure report of a node."""
    return {
        "node": f"node{rank}",
        "host": f"node{rank}",
        "group_rank": rank,
        "round": 1,
        "rank": rank,
        "local_rank": 0,
        "pid": 4711,
        "exitcode": 1,
        "time_ns": NOW + rank * 1_000,
        "error_ns": 100_000,
        "exception": "builtins.ValueError",
        "place": "train.py:88",
        "reached": 1204,
        "message": "Traceback (most recent call last):\n" + "  in step\n" * 100 + "ValueError: not a number",
        "lines": [f'  File "train.py", line {number}, in step' for number in range(8)],
    }


def reports(nodes: int) -> tuple[list[Any], list[Any]]:
    """Return the keys of a round that has failed, and the reports that its nodes send afterwards."""
    keys = Keys("job")
    members = [f"{rank:04x}/1" for rank in range(nodes)]

    def node(rank: int, idle: int) -> bytes:
        told = cause(rank) if idle else None
        return Node(f"node{rank}", "h", "10.0.0.1", "default", 1, 4000, idle, cause=told).encode()

    end = {"kind": "failure", "node": "node0", "group_rank": 0}
    head = Head("ENDED", 1, form="f", size=nodes, world_size=nodes, end=end, cause=cause(nodes // 2))
    table = encode([(member, f"node{rank}", "10.0.0.1") for rank, member in enumerate(members)])
    before: list[Any] = [Entry(keys.head, head.encode(), 1, 1), Entry(f"{keys.table('f')}0", table, 1, 1)]
    for rank, member in enumerate(members):
        before.append(Entry(keys.node(member), node(rank, 0), 1, 1))
        before.append(Entry(keys.slot(member), Slot(1, "1.1", rank, rank, rank, 1).encode(), 1, 1))
    return before, [
        Entry(keys.node(member), node(rank, 1), 1, 2 + rank) for rank, member in enumerate(members)
    ]


def decide(nodes: int, repeats: int) -> str:
    """Measure how long a leader needs to read the reports of all nodes and to decide."""
    before, later = reports(nodes)
    policy, settings = RestartSettings(3, max_same_failures=3), Settings({})
    read, decided = [], []
    for _ in range(repeats):
        view = View(Keys("job"), 1, before)
        assert view.head is not None
        start = time.process_time()
        for entry in later:
            view.apply(entry.mod_revision, [entry])
        middle = time.process_time()
        verdict = round_outcome.judge(view, view.head, settings, policy, True, NOW)
        read.append(middle - start)
        decided.append(time.process_time() - middle)
        assert verdict.head.cause is not None
        assert (verdict.head.cause["rank"], verdict.reason) == (0, None)
    return (
        f"{nodes} nodes that all report a failure: read the reports {statistics.median(read) * 1e3:.0f} ms, "
        f"decide {statistics.median(decided) * 1e3:.1f} ms (processor time, median of {repeats})"
    )


IDLE = """
import os, sys, time, torch
def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))
from elasticrs._engine.inside.flight import answer_with_record
before, start = status("VmRSS"), time.perf_counter()
answer_with_record()
took = time.perf_counter() - start
tid = max(map(int, os.listdir("/proc/self/task")))
time.sleep(float(sys.argv[1]))
with open(f"/proc/self/task/{tid}/status") as file:
    switches = sum(int(line.split()[1]) for line in file if "ctxt_switches" in line)
with open(f"/proc/self/task/{tid}/schedstat") as file:
    cpu = int(file.read().split()[0]) / 1e6
print(f"thread for flight records: {took * 1e3:.1f} ms to start, {status('VmRSS') - before} kB, "
      f"{switches} context switches and {cpu:.2f} ms of processor time in {sys.argv[1]} s")
"""


def idle_thread(seconds: float, folder: str) -> str:
    """Return the cost of the flight record thread in an idle worker that has imported torch."""
    environ = {**os.environ, "ELASTICRS_HEARTBEAT": "", "TORCHELASTIC_ERROR_FILE": f"{folder}/error.json"}
    command = [sys.executable, "-c", IDLE, f"{seconds:g}"]
    return subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verdict", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5, help="the median counts (default: 5)")
    arguments = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f}")
    print(decide(arguments.nodes, arguments.repeats))
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="bench-") as folder:
        print(idle_thread(5.0, folder))


if __name__ == "__main__":
    main()
