"""Trains on three hosts, cuts one of them off in mid-training, takes it in again, and tells what happened.

The hosts are network namespaces of this machine, each with a name, an address and a cable; that needs root.
Without, they are three agents on the loopback interface, and "cut off" means stopped: silent just the same.
The training script is that of `ddp_digits`, as it is. Exits with 1 when anything is not as promised: the job
does not go on with two, the lost host keeps its old worker, it is not taken in again, too little accuracy.
"""

import argparse
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "examples" / "ddp_digits" / "train.py"
sys.path.insert(0, str(ROOT / "tests"))

from helpers import hosts, ports, procs  # noqa: E402 -- the namespaces of the tests

AGENT = "elasticrs.launch"
PORT = 29400
EPOCHS = 60
BATCH_SIZE = 4
CUT_AFTER = 4
HEAL_AFTER = 4
"""Epochs before the cable is pulled, and before it is plugged in again."""
LIMIT = 2.0
"""Seconds of silence after which a host is lost (`keep_alive_interval` times `keep_alive_max_attempt`)."""
ACCURACY = 95.0
HANG = 90.0

UP = re.compile(r"stamp up rank=(\d+) attempt=\d+ ns=(\d+) world=(\d+)")
EPOCH = re.compile(r"epoch (\d+)/\d+: ")
RESUMED = re.compile(r"resumed after epoch (\d+)")
FINAL = re.compile(r"final accuracy on held-out data: ([\d.]+)%")

T = TypeVar("T")


class Line(NamedTuple):
    """What an agent or its worker printed."""

    at: float
    """Seconds since the start of the demo."""
    node: int
    text: str


class PromiseError(Exception):
    """Something is not as promised; the text says what."""


class Place:
    """Where the three agents run, as namespaces."""

    def __init__(self, folder: Path) -> None:
        self._network = hosts.Network(folder, 3)
        self.about = "three network namespaces of this machine, with a cable each"
        self.endpoint = self._network.hosts[0].endpoint(PORT)

    def name(self, node: int) -> str:
        return str(self._network.hosts[node])

    def prefix(self, node: int) -> Sequence[str]:
        return self._network.hosts[node].prefix("/")

    def is_hosted(self) -> bool | None:
        # The endpoint is an address of the first host.
        return True

    def cut_off(self, node: int, _agent: int) -> str:
        self._network.hosts[node].link_down()
        return f"the cable of {self.name(node)} is pulled"

    def heal(self, node: int, _agent: int) -> str:
        self._network.hosts[node].link_up()
        return f"the cable of {self.name(node)} is plugged in again"

    def close(self) -> list[str]:
        return self._network.close()


class Loopback:
    """Where the three agents run when there may be no namespaces."""

    def __init__(self, why: str) -> None:
        self.endpoint = f"127.0.0.1:{ports.free()}"
        self.about = f"three agents on the loopback interface ({why})"

    def name(self, node: int) -> str:
        return f"agent {node + 1}"

    def prefix(self, _node: int) -> Sequence[str]:
        return ()

    def is_hosted(self) -> bool | None:
        address, _, port = self.endpoint.partition(":")
        try:
            socket.create_connection((address, int(port))).close()
        except ConnectionRefusedError:
            return None
        return True

    def cut_off(self, node: int, agent: int) -> str:
        os.kill(agent, signal.SIGSTOP)
        return f"{self.name(node)} is stopped (SIGSTOP)"

    def heal(self, node: int, agent: int) -> str:
        os.kill(agent, signal.SIGCONT)
        return f"{self.name(node)} goes on (SIGCONT)"

    def close(self) -> list[str]:
        return []


class Demo:
    """Three agents, their output, and the story so far."""

    def __init__(self, place: Place | Loopback, folder: Path, *, epochs: int, is_verbose: bool) -> None:
        self._place, self._is_verbose = place, is_verbose
        self._began = time.monotonic()
        self.lines: list[Line] = []
        self._partial: dict[int, bytes] = {}
        # The lost host waits for its cable for as long as the others need to train without it.
        settings = f"last_call_timeout=10,keep_alive_interval={LIMIT / 5:g},store_lost_timeout={HANG:g}"
        arguments = ["--nnodes", "2:3", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        arguments += ["--rdzv-endpoint", place.endpoint, "--rdzv-id", "demo", "--max-restarts", "3"]
        arguments += ["--rdzv-conf", settings, str(TRAIN)]
        arguments += ["--checkpoint", str(folder / "digits.pt"), "--epochs", str(epochs)]
        arguments += ["--batch-size", str(BATCH_SIZE), "--stamps"]
        print(f"On {place.about}, each:\n$ elasticrun {' '.join(arguments)}\n", flush=True)
        self.agents = []
        for node in range(3):
            self.agents.append(self._start(node, arguments))
            if node == 0:
                # On one machine any agent can host the rendezvous; it has to be one that stays.
                self._until(place.is_hosted, "the first agent listens")
        self._tell("started " + ", ".join(place.name(node) for node in range(3)))

    def _start(self, node: int, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
        agent = subprocess.Popen(
            [*self._place.prefix(node), sys.executable, "-m", AGENT, *arguments],
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert agent.stdout is not None
        os.set_blocking(agent.stdout.fileno(), False)
        return agent

    # --- the story ---

    def run(self) -> None:
        """All of it.

        Raises:
            PromiseError: something is not as promised.
        """
        self._wait_for_workers(3, since=0, where=(0, 1, 2))
        epoch = self._wait_for_epochs(CUT_AFTER, since=0)

        since = len(self.lines)
        old = self._worker_of(2)
        self._tell(f"after epoch {epoch}: {self._place.cut_off(2, self.agents[2].pid)}, nobody is told")
        cut = self._now()
        self._until(lambda: True if not is_running(old) else None, "the lost host's old worker is gone")
        self._tell(f"{self._place.name(2)} has ended its worker itself, {self._now() - cut:.1f} s later")
        self._wait_for_workers(2, since, where=(0, 1))
        self._resumed(since)
        epoch = self._wait_for_epochs(HEAL_AFTER, since)

        since = len(self.lines)
        self._tell(f"after epoch {epoch}: {self._place.heal(2, self.agents[2].pid)}")
        self._wait_for_workers(3, since, where=(0, 1, 2))
        self._resumed(since)
        self._until(lambda: True if all(each.poll() is not None for each in self.agents) else None, "the end")
        codes = [agent.returncode for agent in self.agents]
        if any(codes):
            raise PromiseError(f"the agents ended with exit codes {codes}")
        final = next((found for each in self.lines if (found := FINAL.search(each.text))), None)
        if final is None or float(final[1]) <= ACCURACY:
            raise PromiseError(f"the accuracy is not above {ACCURACY} %: {final and final[1]}")
        self._tell(f"all agents ended with success; accuracy on held-out data: {final[1]} %")

    def _wait_for_workers(self, world: int, since: int, where: Sequence[int]) -> None:
        def seen() -> bool | None:
            up = [
                (each.node, int(found[3]))
                for each in self.lines[since:]
                if (found := UP.search(each.text)) and int(found[3]) == world
            ]
            return True if {node for node, _ in up} >= set(where) else None

        self._until(seen, f"{world} workers")
        self._tell(f"{world} workers train: on " + ", ".join(self._place.name(node) for node in where))

    def _resumed(self, since: int) -> None:
        def seen() -> re.Match[str] | None:
            return next((found for each in self.lines[since:] if (found := RESUMED.search(each.text))), None)

        found = self._until(seen, "training resumes from its checkpoint")
        self._tell(f"resumed after epoch {found[1]}, from the checkpoint")

    def _wait_for_epochs(self, count: int, since: int) -> int:
        def seen() -> int | None:
            done = [int(found[1]) for each in self.lines[since:] if (found := EPOCH.search(each.text))]
            return done[-1] if len(done) >= count else None

        return self._until(seen, f"{count} epochs")

    def _worker_of(self, node: int) -> int:
        """The pid of the process that trains there: the one that has the script as its argument."""
        below = procs.descendants(self.agents[node].pid)
        mine = [each.pid for each in below if str(TRAIN) in each.command and AGENT not in each.command]
        if len(mine) != 1:
            raise PromiseError(
                f"expected one worker on {self._place.name(node)}: {[str(each) for each in below]}"
            )
        return mine[0]

    # --- what it stands on ---

    def _until(self, seen: Callable[[], T | None], what: str) -> T:
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
        """Wait a moment for output, and keep it; whether there was any."""
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
                self.lines.append(Line(self._now(), node, text.decode(errors="replace")))
                if self._is_verbose:
                    print(
                        f"{self._now():7.1f} s |{self._place.name(node)}| {self.lines[-1].text}", flush=True
                    )
        return took

    def _is_open(self, node: int) -> bool:
        return self._partial.get(node) != b"\0"

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _tell(self, text: str) -> None:
        print(f"{self._now():7.1f} s  {text}", flush=True)

    def close(self) -> None:
        """End what still runs; its nurseries end the workers."""
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait()
            if agent.stdout:
                agent.stdout.close()


def is_running(pid: int) -> bool:
    found = procs.process(pid)
    return found is not None and found.state != "Z"


def run(folder: Path, *, is_loopback: bool, epochs: int, is_verbose: bool) -> int:
    why = "as asked for" if is_loopback else hosts.why_not()
    place = Loopback(why) if why else Place(folder)
    try:
        demo = Demo(place, folder, epochs=epochs, is_verbose=is_verbose)
        try:
            demo.run()
        except PromiseError as broken:
            for line in demo.lines[-40:]:
                print(f"{line.at:7.1f} s |{place.name(line.node)}| {line.text}")
            print(f"NOT AS PROMISED: {broken}", flush=True)
            return 1
        finally:
            demo.close()
    finally:
        left = place.close()
    if left:
        print(f"NOT AS PROMISED: left on the hosts: {left}", flush=True)
    return 1 if left else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loopback", action="store_true", help="not in namespaces, even if that is possible")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="to train in all (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="all lines of agents and workers, with times")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddp_multinode_") as folder:
        return run(
            Path(folder),
            is_loopback=arguments.loopback,
            epochs=arguments.epochs,
            is_verbose=arguments.verbose,
        )


if __name__ == "__main__":
    sys.exit(main())
