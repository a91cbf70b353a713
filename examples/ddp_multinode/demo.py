"""Trains on three hosts, disconnects and reconnects one of them, and restarts the store where they meet.

The hosts are network namespaces of this machine, each with a name, an address and a cable; that needs root.
Without, they are three agents on the loopback interface, and "cut off" means stopped: silent just the same.
The training script is that of `ddp_digits`, as it is. Exits with 1 when anything is not as promised: the job
does not go on with two, the lost host keeps its old worker, it is not taken in again, a worker ends because
the store does, too little accuracy.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from several_agents import HANG, TRAIN, UP, Agents, PromiseError, is_running

# isort: split
# Found by way of the module above.
from helpers import hosts, ports

PORT = 29400
EPOCHS = 60
BATCH_SIZE = 4
PAUSE = 2
"""Epochs before the cable is pulled, before it is plugged in again, and before and after the store dies."""
LIMIT = 8
"""Seconds of silence after which a host is lost, and for which the store may be away."""


class Place:
    """Runs the three agents in network namespaces."""

    def __init__(self, folder: Path) -> None:
        self._network = hosts.Network(folder, 3)
        self.about = "three network namespaces of this machine, with a cable each"
        self.port, self.endpoint = PORT, self._network.hosts[0].endpoint(PORT)

    def name(self, node: int) -> str:
        return str(self._network.hosts[node])

    def prefix(self, node: int) -> Sequence[str]:
        return self._network.hosts[node].prefix("/")

    def cut_off(self, node: int, _agent: int) -> str:
        self._network.hosts[node].link_down()
        return f"the cable of {self.name(node)} is pulled"

    def heal(self, node: int, _agent: int) -> str:
        self._network.hosts[node].link_up()
        return f"the cable of {self.name(node)} is plugged in again"

    def close(self) -> list[str]:
        return self._network.close()


class Loopback:
    """Runs the three agents on the loopback interface, if network namespaces are not available."""

    def __init__(self, why: str) -> None:
        self.port = ports.free()
        self.endpoint = f"127.0.0.1:{self.port}"
        self.about = f"three agents on the loopback interface ({why})"

    def name(self, node: int) -> str:
        return f"agent {node + 1}"

    def prefix(self, _node: int) -> Sequence[str]:
        return ()

    def cut_off(self, node: int, agent: int) -> str:
        os.kill(agent, signal.SIGSTOP)
        return f"{self.name(node)} is stopped (SIGSTOP)"

    def heal(self, node: int, agent: int) -> str:
        os.kill(agent, signal.SIGCONT)
        return f"{self.name(node)} goes on (SIGCONT)"

    def close(self) -> list[str]:
        return []


class Store:
    """The store where the agents meet. It runs as a separate program on the first host, and keeps
    its state.
    """

    def __init__(self, place: Place | Loopback, folder: Path) -> None:
        command = ["-m", "elasticrs.store", "--port", str(place.port), "--state", str(folder / "state")]
        command += ["--grace", str(LIMIT)]
        self.shown = f"python {' '.join(command)}"
        self._argv = [*place.prefix(0), sys.executable, *command]
        self.start()

    def start(self) -> None:
        """Start the store, and wait until it is ready."""
        self._program = subprocess.Popen(self._argv, stdout=subprocess.PIPE)
        assert self._program.stdout is not None
        self._program.stdout.readline()

    def kill(self) -> None:
        self._program.kill()
        self._program.wait()
        if self._program.stdout is not None:
            self._program.stdout.close()


class Demo(Agents):
    """Demo with three agents and the store where they meet."""

    def __init__(
        self, place: Place | Loopback, store: Store, folder: Path, *, epochs: int, is_verbose: bool
    ) -> None:
        super().__init__(place.name, place.prefix, is_verbose=is_verbose)
        self._place, self._store = place, store
        # Use a long timeout, because the lost host must wait for its cable while the others train without it.
        settings = f"last_call_timeout=10,store_grace={LIMIT},store_lost_timeout={HANG:g},is_host=0"
        arguments = ["--nnodes", "2:3", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        arguments += ["--rdzv-endpoint", place.endpoint, "--rdzv-id", "demo", "--max-restarts", "3"]
        arguments += ["--rdzv-conf", settings, str(TRAIN)]
        arguments += ["--checkpoint", str(folder / "digits.pt"), "--epochs", str(epochs)]
        arguments += ["--batch-size", str(BATCH_SIZE), "--stamps"]
        print(f"On {place.about}; on the first:\n$ {store.shown}", flush=True)
        print(f"and on each:\n$ elasticrun {' '.join(arguments)}\n", flush=True)
        for _ in range(3):
            self.start(arguments)
        self.tell("started " + ", ".join(place.name(node) for node in range(3)))

    # --- the story ---

    def run(self) -> None:
        self.wait_for_workers(3, since=0, where=(0, 1, 2))
        epoch = self.wait_for_epochs(PAUSE, since=0)

        since = len(self.lines)
        old = self.worker_of(2)
        self.tell(f"after epoch {epoch}: {self._place.cut_off(2, self.agents[2].pid)}, nobody is told")
        cut = self.now()
        self.until(lambda: True if not is_running(old) else None, "the lost host's old worker is gone")
        self.tell(f"{self._place.name(2)} has ended its worker itself, {self.now() - cut:.1f} s later")
        self.wait_for_workers(2, since, where=(0, 1))
        self.wait_for_resume(since)
        epoch = self.wait_for_epochs(PAUSE, since)

        since = len(self.lines)
        self.tell(f"after epoch {epoch}: {self._place.heal(2, self.agents[2].pid)}")
        self.wait_for_workers(3, since, where=(0, 1, 2))
        self.wait_for_resume(since)
        epoch = self.wait_for_epochs(PAUSE, since)

        since = len(self.lines)
        self._store.kill()
        self.tell(f"after epoch {epoch}: the store is killed (SIGKILL)")
        self._store.start()
        self.tell("it is started again, with the same file")
        epoch = self.wait_for_epochs(PAUSE, since)
        if any(UP.search(each.text) for each in self.lines[since:]):
            raise PromiseError("workers were started again")
        self.tell(f"after epoch {epoch}: the same workers train")
        self.wait_for_success((0, 1, 2))


def run(folder: Path, *, is_loopback: bool, epochs: int, is_verbose: bool) -> int:
    why = "as asked for" if is_loopback else hosts.why_not()
    place = Loopback(why) if why else Place(folder)
    store = Store(place, folder)
    try:
        is_kept = Demo(place, store, folder, epochs=epochs, is_verbose=is_verbose).play()
    finally:
        store.kill()
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
