"""Trains with three agents that meet in etcd, kills the agent with rank 0 and then a member of etcd, and
describes what happened.

The training script is that of `ddp_digits`, as it is. Exits with 1 when anything is not as promised: the
others do not go on, a worker ends because a member of etcd does, too little accuracy.
"""

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

from several_agents import TRAIN, UP, Agents, PromiseError

# isort: split
# Found by way of the module above.
from helpers import etcd

EPOCHS = 40
BATCH_SIZE = 4
PAUSE = 2
"""Epochs before the agent is killed, and before the member of etcd is."""
NODES = 3
RUNNING = re.compile(r"elasticrs\[.*: attempt .* is running")


class Demo(Agents):
    """Demo with three agents and an etcd cluster of three members."""

    def __init__(self, cluster: etcd.Etcd, folder: Path, *, epochs: int, is_verbose: bool) -> None:
        super().__init__(lambda node: f"agent {node + 1}", lambda _: (), is_verbose=is_verbose)
        self._cluster = cluster
        arguments = ["--nnodes", f"{NODES - 1}:{NODES}", "--nproc-per-node", "1", "--warm", "auto"]
        arguments += ["--rdzv-backend", "etcd", "--rdzv-endpoint", cluster.endpoint, "--rdzv-id", "demo"]
        arguments += ["--rdzv-conf", "last_call_timeout=10", str(TRAIN)]
        arguments += ["--checkpoint", str(folder / "digits.pt"), "--epochs", str(epochs)]
        arguments += ["--batch-size", str(BATCH_SIZE), "--stamps"]
        print(f"{NODES} agents, each:\n$ elasticrun {' '.join(arguments)}\n", flush=True)
        self._arguments = arguments
        for _ in range(NODES):
            self.start(arguments)
        self.tell("started " + ", ".join(self.name(node) for node in range(NODES)))

    def run(self) -> None:
        self.wait_for_workers(NODES, since=0, where=range(NODES))
        epoch = self.wait_for_epochs(PAUSE, since=0)

        since = len(self.lines)
        first = next(each.node for each in self.lines if (up := UP.search(each.text)) and up[1] == "0")
        others = [node for node in range(NODES) if node != first]
        killed = self.now()
        self.agents[first].kill()
        self.tell(f"after epoch {epoch}: {self.name(first)}, which has rank 0, is killed (SIGKILL)")
        self.wait_for_workers(NODES - 1, since, where=others)
        started = max(each.at for each in self.lines[since:] if RUNNING.search(each.text))
        self.tell(f"their new workers were started {started - killed:.2f} s after the kill")
        self.wait_for_resume(since)
        epoch = self.wait_for_epochs(PAUSE, since)

        since = len(self.lines)
        self._cluster.kill(self._cluster.leader())
        self.tell(f"after epoch {epoch}: the leader of etcd is killed (SIGKILL)")
        epoch = self.wait_for_epochs(PAUSE, since)
        if any(UP.search(each.text) for each in self.lines[since:]):
            raise PromiseError("workers were started again")
        self.tell(f"after epoch {epoch}: the same workers train")
        self.wait_for_success(others)


def run(folder: Path, *, epochs: int, is_verbose: bool) -> int:
    program = etcd.binary()
    if program is None:
        print("no etcd: install etcd-server, or run `make setup` where Debian's packages are at hand")
        return 1
    os.environ["TORCHELASTIC_ETCD_BINARY_PATH"] = program
    cluster = etcd.Etcd(folder, size=3)
    try:
        return 0 if Demo(cluster, folder, epochs=epochs, is_verbose=is_verbose).play() else 1
    finally:
        cluster.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="to train in all (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="all lines of agents and workers, with times")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddp_etcd_") as folder:
        return run(Path(folder), epochs=arguments.epochs, is_verbose=arguments.verbose)


if __name__ == "__main__":
    sys.exit(main())
