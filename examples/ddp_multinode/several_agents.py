"""Runs several agents of one job on this machine, collects what they and their workers print, and describes
the run.
"""

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "examples" / "ddp_digits" / "train.py"
sys.path.insert(0, str(ROOT / "tests"))

from helpers import procs  # noqa: E402 -- what the tests know of processes

AGENT = "elasticrs.launch"
ACCURACY = 95.0
HANG = 90.0

UP = re.compile(r"stamp up rank=(\d+) attempt=\d+ ns=(\d+) world=(\d+)")
EPOCH = re.compile(r"epoch (\d+)/\d+: ")
RESUMED = re.compile(r"resumed after epoch (\d+)")
FINAL = re.compile(r"final accuracy on held-out data: ([\d.]+)%")

T = TypeVar("T")


class Line(NamedTuple):
    """A line printed by an agent or its worker."""

    at: float
    """Seconds since the start of the demo."""
    node: int
    text: str


class PromiseError(Exception):
    """The job did not behave as promised. The message explains the difference."""


class Agents:
    """Agents on the nodes 0, 1, …, and the lines that they have printed so far.

    Args:
        name: of a node, as the story calls it.
        prefix: what starts a program there.
    """

    def __init__(
        self, name: Callable[[int], str], prefix: Callable[[int], Sequence[str]], *, is_verbose: bool
    ) -> None:
        self.name, self._prefix, self._is_verbose = name, prefix, is_verbose
        self._began = time.monotonic()
        self.lines: list[Line] = []
        self._partial: dict[int, bytes] = {}
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, arguments: Sequence[str]) -> None:
        """Start the agent of the next node."""
        agent = subprocess.Popen(
            [*self._prefix(len(self.agents)), sys.executable, "-m", AGENT, *arguments],
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert agent.stdout is not None
        os.set_blocking(agent.stdout.fileno(), False)
        self.agents.append(agent)

    # --- waiting for events ---

    def wait_for_workers(self, world: int, since: int, where: Sequence[int]) -> None:
        def seen() -> bool | None:
            up = [
                (each.node, int(found[3]))
                for each in self.lines[since:]
                if (found := UP.search(each.text)) and int(found[3]) == world
            ]
            return True if {node for node, _ in up} >= set(where) else None

        self.until(seen, f"{world} workers")
        self.tell(f"{world} workers train: on " + ", ".join(self.name(node) for node in where))

    def wait_for_resume(self, since: int) -> None:
        def seen() -> re.Match[str] | None:
            return next((found for each in self.lines[since:] if (found := RESUMED.search(each.text))), None)

        found = self.until(seen, "training resumes from its checkpoint")
        self.tell(f"resumed after epoch {found[1]}, from the checkpoint")

    def wait_for_epochs(self, count: int, since: int) -> int:
        def seen() -> int | None:
            done = [int(found[1]) for each in self.lines[since:] if (found := EPOCH.search(each.text))]
            return done[-1] if len(done) >= count else None

        return self.until(seen, f"{count} epochs")

    def worker_of(self, node: int) -> int:
        """Return the pid of the worker on a node, which is the process with the script as its argument."""
        below = procs.descendants(self.agents[node].pid)
        mine = [each.pid for each in below if str(TRAIN) in each.command and AGENT not in each.command]
        if len(mine) != 1:
            raise PromiseError(f"expected one worker on {self.name(node)}: {[str(each) for each in below]}")
        return mine[0]

    def wait_for_success(self, nodes: Sequence[int]) -> None:
        """Wait until the agents of these nodes have exited. Check that all succeeded and that the model has
        learned.
        """
        agents = [self.agents[node] for node in nodes]
        self.until(lambda: True if all(each.poll() is not None for each in agents) else None, "the end")
        codes = [agent.returncode for agent in agents]
        if any(codes):
            raise PromiseError(f"the agents ended with exit codes {codes}")
        final = next((found for each in self.lines if (found := FINAL.search(each.text))), None)
        if final is None or float(final[1]) <= ACCURACY:
            raise PromiseError(f"the accuracy is not above {ACCURACY} %: {final and final[1]}")
        self.tell(f"all agents ended with success; accuracy on held-out data: {final[1]} %")

    # --- basic operations ---

    def until(self, seen: Callable[[], T | None], what: str) -> T:
        deadline = time.monotonic() + HANG
        while (found := seen()) is None:
            running = [agent for agent in self.agents if agent.poll() is None]
            took = self._take()
            if not running and not took and (found := seen()) is None:
                raise PromiseError(f"all agents ended before this was seen: {what}")
            if time.monotonic() > deadline:
                raise PromiseError(f"not seen within {HANG:.0f} s: {what}")
        return found

    def _take(self) -> bool:
        """Wait briefly for output and store it. Return true if there was any."""
        pipes = {agent.stdout.fileno(): node for node, agent in enumerate(self.agents) if agent.stdout}
        ready, _, _ = select.select([fd for fd, node in pipes.items() if self._is_open(node)], [], [], 0.02)
        took = False
        for fd in ready:
            chunk = os.read(fd, 1 << 16)
            node = pipes[fd]
            if not chunk:
                self._partial[node] = b"\0"
                continue
            took = True
            *whole, self._partial[node] = (self._partial.get(node, b"") + chunk).split(b"\n")
            for text in whole:
                self.lines.append(Line(self.now(), node, text.decode(errors="replace")))
                if self._is_verbose:
                    print(f"{self.now():7.1f} s |{self.name(node)}| {self.lines[-1].text}", flush=True)
        return took

    def _is_open(self, node: int) -> bool:
        return self._partial.get(node) != b"\0"

    def now(self) -> float:
        return time.monotonic() - self._began

    def tell(self, text: str) -> None:
        print(f"{self.now():7.1f} s  {text}", flush=True)

    def close(self) -> None:
        """Kill the agents that are still running. Their nurseries then kill the workers."""
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait()
            if agent.stdout:
                agent.stdout.close()

    # --- the story ---

    def run(self) -> None:
        """Run the example.

        Raises:
            PromiseError: something is not as promised.
        """
        raise NotImplementedError

    def play(self) -> bool:
        """Run the demo and stop all agents. If the job does not behave as promised, print the last lines and
        return false.
        """
        try:
            self.run()
        except PromiseError as broken:
            for line in self.lines[-40:]:
                print(f"{line.at:7.1f} s |{self.name(line.node)}| {line.text}")
            print(f"NOT AS PROMISED: {broken}", flush=True)
            return False
        finally:
            self.close()
        return True


def is_running(pid: int) -> bool:
    found = procs.process(pid)
    return found is not None and found.state != "Z"
