"""The workers' store: torch's clients with torch's server (libuv) and with elasticrs's server.

All processes are there from the beginning; both servers are asked in turn. What is measured ends with a reply
of the server, so a ``set`` is measured with the ``add`` behind it.

One or two clients share a core with the server: who waits for a reply leaves the core to whoever answers.
Elsewhere the kernel wakes an idle core for each operation, which costs three times as much in one turn as in
the next.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.harness import Launcher, Options, Row, Samples, environment, percentile, take_turns, worker

CASES = (
    # Operation, number of clients, and repetitions per client in a turn.
    ("get", 1, 4000),
    ("get", 16, 1000),
    ("add", 1, 4000),
    ("add", 16, 1000),
    ("set+add", 1, 4000),
    ("set+add", 16, 1000),
    ("ping-pong", 2, 2000),
    ("ping-pong", 16, 500),
    ("get-1MiB", 1, 200),
    ("get-1MiB", 16, 20),
)

# Maximum number of clients that share a core with the server.
FEW = 2


def measure(options: Options) -> list[Row]:
    """Measure the latency of an operation for its client, the time per operation of all clients together, and
    the server's CPU time per operation.
    """
    with ExitStack() as stack:
        clients = stack.enter_context(_started("store_client.py"))
        servers = {
            each.name: stack.enter_context(_started("store_server.py", each.name))
            for each in options.launchers
        }
        ports = {name: int(_line(server)) for name, server in servers.items()}
        rows: list[Row] = []
        for operation, count, repeats in CASES:
            rows += _case(options, clients, servers, ports, operation, count, repeats)
        return rows


def _case(
    options: Options,
    clients: subprocess.Popen[str],
    servers: dict[str, subprocess.Popen[str]],
    ports: dict[str, int],
    operation: str,
    count: int,
    repeats: int,
) -> list[Row]:
    latency, throughput, cost = Samples(options), Samples(options), Samples(options)
    repeats = options.repeats(repeats, max(20, repeats // 20))
    everywhere = os.sched_getaffinity(0)
    cores = {min(everywhere)} if count <= FEW else everywhere

    def one(launcher: Launcher) -> None:
        assert clients.stdin is not None
        for process in (clients, servers[launcher.name]):
            _bind(process.pid, cores)
        clients.stdin.write(f"{ports[launcher.name]} {count} {operation} {repeats}\n")
        clients.stdin.flush()
        before = _cpu_ns(servers[launcher.name].pid)
        wall, *spans = map(int, _line(clients).split())
        latency.add(launcher, *(span / 1000 for span in spans))
        throughput.add(launcher, wall / 1000 / (count * repeats))
        # The CPU time includes the few operations before the start.
        cost.add(launcher, (_cpu_ns(servers[launcher.name].pid) - before) / 1000 / (count * repeats))

    take_turns(options, options.repeats(7, 2), one)
    name = f"store {operation}, {count} client{'s' if count > 1 else ''}"
    conditions = "torch's clients, a process each; server in a process of its own"
    if count <= FEW:
        conditions += "; all on one core"
    return [
        *latency.rows(f"{name}: p50", "µs", conditions),
        *latency.rows(f"{name}: p99", "µs", conditions, lambda values: percentile(values, 99)),
        *throughput.rows(f"{name}: time per operation", "µs", f"{conditions}; wall / operations of all"),
        *cost.rows(f"{name}: CPU time of the server", "µs", f"{conditions}; per operation"),
    ]


def _bind(pid: int, cores: set[int]) -> None:
    """Bind all threads of a process to ``cores``. Threads that it creates later inherit the binding."""
    for path in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(path.name), cores)


def _cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process so far, in nanoseconds."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


@contextmanager
def _started(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, worker(program), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
        text=True,
    )
    try:
        yield process
    finally:
        process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} has ended")
    return line
