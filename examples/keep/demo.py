"""Has accidents happen to the training in `train.py`, and tells how many steps each accident costs.

A worker is killed, raises an exception, or hangs. A node is drained (SIGTERM to its agent) or lost.

The training runs under torchrun, where it continues from its last checkpoint (one every 25 steps). It also
runs under elasticrun (`python -m elasticrs.launch`), where it continues from the state that `Keep` has copied
into memory. Under each of them, it runs first on one node, and then on three (three agents on this machine),
two of which leave.

Exits with 1 if a promise is broken: a step was lost with `Keep`, or the training with `Keep` on one node did
not end with the same result as a training without accidents.
"""

import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from agents import Job

WORKERS = 2
NODES = 3
ON_ONE_NODE = {"kill": 65, "raise": 120, "hang": 190}
ON_NODES = {"drain": 90, "lose": 165}
"""Accidents on one node and on several nodes, and the training step in which each of them happens."""
WORDS = {
    "kill": "SIGKILL of a worker",
    "raise": "exception in a worker",
    "hang": "hang of a worker",
    "drain": "SIGTERM to a node",
    "lose": "loss of a node",
}
STAMP = re.compile(r"stamp (?P<what>\w+) rank=\d+ step=(?P<step>\d+) ns=(?P<ns>\d+) pid=(?P<pid>\d+)")
DONE = re.compile(r"done: accuracy ([\d.]+%), sum of the parameters (\S+)")

TORCHRUN = [str(Path(sys.executable).parent / "torchrun"), "--max-restarts", "6"]
OURS = [sys.executable, "-m", "elasticrs.launch", "--max-restarts", "3", "--warm", "auto"]
SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable of torchrun. If it is not set, a restarted rank often fails, because it finds the
ranks' addresses of the attempt before in the store (torchrun 2.15).
"""


class Stamp(NamedTuple):
    """A line that a worker prints when it continues, has ended a step, or has an accident."""

    what: str
    step: int
    ns: int


class Cost(NamedTuple):
    """Cost of an accident."""

    lost: int
    """Steps that had ended before the accident and were run again."""
    seconds: float
    """Time from the accident until a rank completed a step that no rank had completed before."""


class Story(NamedTuple):
    """Description of the runs for users, and a list of broken promises."""

    account: list[str]
    broken: list[str]


def job_of(launcher: Sequence[str], checkpoint: Path, accidents: dict[str, int]) -> Job:
    """Return a job that runs `train.py`. When a worker of the job prints that its node is to be drained or
    lost, this program drains or kills the agent of that node.

    Args:
        launcher: command that starts an agent, with the options that are the same for all agents.
        checkpoint: file for the checkpoints.
        accidents: the kinds of accidents that are to happen, with the training step of each one.
    """
    program = [str(Path(__file__).with_name("train.py")), "--checkpoint", str(checkpoint), "--stamps"]
    if accidents:
        program += ["--accidents", *(f"{kind}:{step}" for kind, step in accidents.items())]

    def take(number: int, line: str) -> bool:
        stamp = STAMP.search(line)
        if stamp is not None and stamp["what"] == "drain":
            job.agents[number].terminate()
        elif stamp is not None and stamp["what"] == "lose":
            # Kill the worker, too, because a worker of torchrun would outlive its agent.
            job.agents[number].kill()
            with suppress(ProcessLookupError):
                os.kill(int(stamp["pid"]), signal.SIGKILL)
        return stamp is not None

    job = Job([*launcher, *program], {SHARED: "1"}, take)
    return job


def main() -> int:
    alone = ["--standalone", "--nproc-per-node", str(WORKERS)]
    ours = [*OURS, *alone, "--hang-timeout", "2"]
    with tempfile.TemporaryDirectory(prefix="keep_") as name:
        folder = Path(name)
        undisturbed = run("Undisturbed", ours, folder / "undisturbed.pt", {})
        # Let no worker hang under torchrun, because torchrun would not notice it.
        noticed = {kind: step for kind, step in ON_ONE_NODE.items() if kind != "hang"}
        title = "torchrun, a checkpoint every 25 steps"
        theirs = run(title, [*TORCHRUN, *alone], folder / "torchrun.pt", noticed)
        kept = run("elasticrun, the state is kept", ours, folder / "kept.pt", ON_ONE_NODE)
        theirs_on_nodes = run_on_nodes(title, TORCHRUN, folder / "torchrun_nodes.pt")
        kept_on_nodes = run_on_nodes("elasticrun, the state is kept", OURS, folder / "kept_nodes.pt")
    story = tell(undisturbed, [theirs, theirs_on_nodes], [kept, kept_on_nodes])
    print("\n".join(["", *story.account, *(f"NOT AS PROMISED: {each}" for each in story.broken)]), flush=True)
    return 1 if story.broken else 0


def run(title: str, launcher: Sequence[str], checkpoint: Path, accidents: dict[str, int]) -> str:
    """Run the training on one node, and return its output. If the job fails, return an empty string."""
    job = job_of(launcher, checkpoint, accidents)
    print(f"\n{title}:\n$ {' '.join(job.command)}", flush=True)
    job.start()
    job.read()
    return job.output if job.close() else ""


def run_on_nodes(title: str, launcher: Sequence[str], checkpoint: Path) -> str:
    """Run the training on several nodes. One of them is drained, and another one is lost. Return the output
    of all agents; an empty string if the first agent fails.
    """
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "demo"]
    options = ["--nnodes", f"1:{NODES}", "--nproc-per-node", "1", *where]
    job = job_of([*launcher, *options], checkpoint, ON_NODES)
    print(f"\n{title}, {NODES} nodes:\n$ {' '.join(job.command)}", flush=True)
    for node in range(NODES):
        job.start("--rdzv-conf", f"is_host={int(node == 0)},last_call_timeout=3", node=node)
        job.wait_for_port(port)
    job.read()
    return job.output if job.close() else ""


def tell(undisturbed: str, theirs: Sequence[str], kept: Sequence[str]) -> Story:
    """Tell from their output what the accidents cost in each run, and which promises are broken.

    Args:
        undisturbed: output of the run without accidents.
        theirs: outputs of the two runs under torchrun: on one node, and on several nodes.
        kept: outputs of the two runs under elasticrun with `Keep`: on one node, and on several nodes.
    """
    costs = [{**costs_of(alone), **costs_of(on_nodes)} for alone, on_nodes in (theirs, kept)]
    account = [f"{'What it cost':24}{'torchrun and torch.save':>32}{'elasticrun and Keep':>32}"]
    broken = []
    for kind, words in WORDS.items():
        cells = [describe(found.get(kind)) for found in costs]
        if kind == "hang":
            cells[0] = "not noticed"
        account.append(f"{words:24}" + "".join(f"{cell:>32}" for cell in cells))
        ours = costs[1].get(kind)
        if ours is None or ours.lost:
            broken.append(f"{words}: {describe(ours)} with Keep")
    ends = [DONE.search(text) for text in (undisturbed, kept[0])]
    if ends[0] is None or ends[1] is None or not DONE.search(kept[1]):
        return Story(account, [*broken, "a job failed"])
    account += [
        f"{text}: accuracy {end[1]}, sum of the parameters {end[2]}"
        for text, end in zip(("undisturbed", "with Keep  "), ends, strict=True)
    ]
    if ends[0].groups() != ends[1].groups():
        broken.append("the run with Keep ended differently from the undisturbed one")
    return Story(account, broken)


def describe(cost: Cost | None) -> str:
    return "no recovery" if cost is None else f"{cost.lost} steps lost, {cost.seconds:.1f} s"


def costs_of(output: str) -> dict[str, Cost]:
    """Return the cost of each accident from which the job recovered, by kind."""
    stamps = sorted(
        (Stamp(found["what"], int(found["step"]), int(found["ns"])) for found in STAMP.finditer(output)),
        key=lambda stamp: stamp.ns,
    )
    costs = {}
    for at, accident in enumerate(stamps):
        starts = [number for number in range(at, len(stamps)) if stamps[number].what == "continues"]
        if accident.what not in WORDS or not starts:
            continue
        before = max((each.step for each in stamps[: starts[0]] if each.what == "ended"), default=0)
        later = stamps[starts[0] :]
        new = [each.ns for each in later if (each.what, each.step) == ("ended", before + 1)]
        if new:
            back = min(each.step for each in later if each.what == "continues" and each.ns < new[0])
            costs[accident.what] = Cost(max(0, before - back), (new[0] - accident.ns) / 1e9)
    return costs


if __name__ == "__main__":
    sys.exit(main())
