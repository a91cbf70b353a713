"""Trains on three hosts, cuts one of them off in mid-training, takes it in again, and tells what happened.

The hosts are network namespaces of this machine, each with a name, an address and a cable; that needs root.
Without, they are three agents on the loopback interface, and "cut off" means stopped: silent just the same.
The training script is that of `ddp_digits`, as it is. Exits with 1 when anything is not as promised: the job
does not go on with two, the lost host keeps its old worker, it is not taken in again, too little accuracy.
"""

import argparse
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from several_agents import HANG, TRAIN, Agents, is_running

# isort: split
# Found by way of the module above.
from helpers import hosts, ports

PORT = 29400
EPOCHS = 60
BATCH_SIZE = 4
CUT_AFTER = 4
HEAL_AFTER = 4
"""Epochs before the cable is pulled, and before it is plugged in again."""
LIMIT = 2.0
"""Seconds of silence after which a host is lost (`keep_alive_interval` times `keep_alive_max_attempt`)."""


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


class Demo(Agents):
    """Three agents, their output, and the story so far."""

    def __init__(self, place: Place | Loopback, folder: Path, *, epochs: int, is_verbose: bool) -> None:
        super().__init__(place.name, place.prefix, is_verbose=is_verbose)
        self._place = place
        # The lost host waits for its cable for as long as the others need to train without it.
        settings = f"last_call_timeout=10,keep_alive_interval={LIMIT / 5:g},store_lost_timeout={HANG:g}"
        arguments = ["--nnodes", "2:3", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        arguments += ["--rdzv-endpoint", place.endpoint, "--rdzv-id", "demo", "--max-restarts", "3"]
        arguments += ["--rdzv-conf", settings, str(TRAIN)]
        arguments += ["--checkpoint", str(folder / "digits.pt"), "--epochs", str(epochs)]
        arguments += ["--batch-size", str(BATCH_SIZE), "--stamps"]
        print(f"On {place.about}, each:\n$ elasticrun {' '.join(arguments)}\n", flush=True)
        for node in range(3):
            self.start(arguments)
            if node == 0:
                # On one machine any agent can host the rendezvous; it has to be one that stays.
                self.until(place.is_hosted, "the first agent listens")
        self.tell("started " + ", ".join(place.name(node) for node in range(3)))

    # --- the story ---

    def run(self) -> None:
        self.wait_for_workers(3, since=0, where=(0, 1, 2))
        epoch = self.wait_for_epochs(CUT_AFTER, since=0)

        since = len(self.lines)
        old = self.worker_of(2)
        self.tell(f"after epoch {epoch}: {self._place.cut_off(2, self.agents[2].pid)}, nobody is told")
        cut = self.now()
        self.until(lambda: True if not is_running(old) else None, "the lost host's old worker is gone")
        self.tell(f"{self._place.name(2)} has ended its worker itself, {self.now() - cut:.1f} s later")
        self.wait_for_workers(2, since, where=(0, 1))
        self.wait_for_resume(since)
        epoch = self.wait_for_epochs(HEAL_AFTER, since)

        since = len(self.lines)
        self.tell(f"after epoch {epoch}: {self._place.heal(2, self.agents[2].pid)}")
        self.wait_for_workers(3, since, where=(0, 1, 2))
        self.wait_for_resume(since)
        self.wait_for_success((0, 1, 2))


def run(folder: Path, *, is_loopback: bool, epochs: int, is_verbose: bool) -> int:
    why = "as asked for" if is_loopback else hosts.why_not()
    place = Loopback(why) if why else Place(folder)
    try:
        is_kept = Demo(place, folder, epochs=epochs, is_verbose=is_verbose).play()
    finally:
        left = place.close()
    if left:
        print(f"NOT AS PROMISED: left on the hosts: {left}", flush=True)
    return 0 if is_kept and not left else 1


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
