"""A job of several agents on this machine. Each agent is a "node", and they communicate over loopback.

Unless all start at once, the first agent is waited for until it listens: it hosts the store. All share one
channel of reports. Their attempts say nothing here, as torchrun counts them for each node: a round is told by
the order of its reports.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.harness import HANG, Launcher, Report, Reports, environment
from benchmarks.procs import nothing_left, tree

LISTEN, ESTABLISHED = "0A", "01"  # include/net/tcp_states.h
LAST_LINES = 2000


class Agent:
    def __init__(self, command: Sequence[str], folder: Path, reports: Path, number: int) -> None:
        self._stderr = folder / f"stderr-{number}"
        self.started_ns = time.monotonic_ns()
        with self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                # Files that a killed agent leaves in its temporary folder are removed with this folder.
                env=environment() | {"BENCH_REPORTS": str(reports), "TMPDIR": str(folder)},
                cwd=folder,
                start_new_session=True,
            )
        self.is_expected_to_run = True

    def check(self) -> None:
        """Raise an exception with the agent's last output if it has exited unexpectedly."""
        if self.is_expected_to_run and (code := self.process.poll()) is not None:
            said = self._stderr.read_text(encoding="utf-8", errors="replace")[-LAST_LINES:]
            raise RuntimeError(f"an agent ended with {code}: {said}")

    def kill(self) -> int:
        """Send SIGKILL to the agent only. Return the time just before."""
        self.is_expected_to_run = False
        killed_ns = time.monotonic_ns()
        self.process.kill()
        return killed_ns

    def silence(self) -> int:
        """Stop all processes of this node with SIGSTOP, so that the node does not respond. Return the time
        just before.
        """
        self.is_expected_to_run = False
        pids = tree(self.process.pid)
        stopped_ns = time.monotonic_ns()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return stopped_ns


class Shape(NamedTuple):
    nodes: int
    nproc: int

    @property
    def size(self) -> int:
        return self.nodes * self.nproc

    def __str__(self) -> str:
        workers = f"{self.nproc} workers each" if self.nproc > 1 else "a worker each"
        return f"{self.nodes} nodes of one machine, {workers}"


class Job:
    """Agents of one job. Created by :func:`job`."""

    def __init__(self, launcher: Launcher, shape: Shape, arguments: Sequence[str], folder: Path) -> None:
        self.agents: list[Agent] = []
        self.reports = Reports(folder / "reports", self.check)
        self._launcher, self._shape, self._arguments, self._folder = launcher, shape, arguments, folder
        self._port = free_port()

    def check(self) -> None:
        for agent in self.agents:
            agent.check()

    def start(self, count: int = 1) -> Agent:
        """Start ``count`` agents at once, and return the last one."""
        for _ in range(count):
            self._start()
        return self.agents[-1]

    def _start(self) -> None:
        number = len(self.agents)
        command = (
            *self._launcher.command,
            *("--nnodes", str(self._shape.nodes), "--nproc-per-node", str(self._shape.nproc)),
            # Use a new ID for each job, because etcd remembers the IDs of earlier jobs.
            *("--rdzv-backend", "c10d", "--rdzv-id", f"bench-{self._port}"),
            *("--rdzv-endpoint", f"127.0.0.1:{self._port}"),
            *("--log-dir", str(self._folder / f"logs-{number}")),
            *self._arguments,
        )
        self.agents.append(Agent(command, self._folder, self._folder / "reports", number))

    def start_waiting(self, count: int) -> None:
        """Start ``count`` agents one after another. Wait until each has connected to the store before
        starting the next.
        """
        for _ in range(count):
            before = self._connections()
            self._start()
            while True:
                now = self._connections()
                # The first agent is ready once it listens, even if it does not connect to itself.
                if now.is_listening and (len(self.agents) == 1 or now.established > before.established):
                    break
                self._pause()

    def start_all(self) -> None:
        """Start all agents. Start the host of the store first."""
        self.start_waiting(1)
        self.start(self._shape.nodes - 1)

    def node_of(self, report: Report) -> int:
        """Return the group rank of a worker."""
        return report.rank // self._shape.nproc

    def agent_of(self, report: Report) -> Agent:
        return next(agent for agent in self.agents if report.pid in tree(agent.process.pid))

    def running(self) -> list[Report]:
        """Wait until all workers of a rendezvous round have started, and return their reports."""
        return self.reports.take("first-line", self._shape.size)

    def _pause(self) -> None:
        self.check()
        if (time.monotonic_ns() - self.agents[-1].started_ns) / 1e9 > HANG:
            raise TimeoutError("an agent does not come up")
        time.sleep(0.005)

    def _connections(self) -> "Connections":
        texts = (Path(f"/proc/net/{name}").read_text(encoding="ascii") for name in ("tcp", "tcp6"))
        found = [connections(text, self._port) for text in texts]
        return Connections(any(each.is_listening for each in found), sum(each.established for each in found))


@contextmanager
def job(launcher: Launcher, shape: Shape, *arguments: str) -> Iterator[Job]:
    """Provide a job whose agents can be started. At the end of the block, all of its processes are killed."""
    with TemporaryDirectory(prefix="bench-") as name:
        made = Job(launcher, shape, arguments, Path(name))
        try:
            with nothing_left():
                yield made
        finally:
            made.reports.close()
            for agent in made.agents:
                agent.process.poll()


class Connections(NamedTuple):
    """State of a port according to the kernel."""

    is_listening: bool
    established: int
    """Connections that were accepted there."""


def connections(text: str, port: int) -> Connections:
    """Parse the text of ``/proc/net/tcp`` or ``tcp6``, and return the state of a port."""
    states = [
        fields[3]
        for fields in (line.split() for line in text.splitlines()[1:])
        if int(fields[1].rpartition(":")[2], 16) == port
    ]
    return Connections(LISTEN in states, states.count(ESTABLISHED))


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
