"""Kills a worker, raises an exception, and lets a worker hang; tells how many steps each of them costs.

Runs `train.py` three times: undisturbed, under torchrun, where it continues from a checkpoint of every 25
steps, and under `python -m elasticrs.launch`, where it continues from the state that `Keep` has kept. Exits
with 1 when anything is not as promised: a step was lost with `Keep`, or its training ended differently from
the undisturbed one.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

WORKERS = 2
ACCIDENTS = {"kill": 65, "raise": 120, "hang": 190}
"""Steps in which they happen."""
WORDS = {"kill": "SIGKILL of a worker", "raise": "exception in a worker", "hang": "hang of a worker"}

STAMP = re.compile(
    r"stamp (?P<what>\w+) rank=(?P<rank>\d+) attempt=(?P<attempt>\d+) step=(?P<step>\d+) ns=(?P<ns>\d+)"
)
DONE = re.compile(r"done: accuracy ([\d.]+%), sum of the parameters (\S+)")


class Stamp(NamedTuple):
    """A line that a worker prints when it continues, has ended a step, or has an accident."""

    what: str
    rank: int
    attempt: int
    step: int
    ns: int


class Cost(NamedTuple):
    """Cost of an accident."""

    lost: int
    """Steps that had ended before the accident and were run again."""
    seconds: float
    """Time from the accident until all ranks had ended a step that no rank had ended before."""


class Story(NamedTuple):
    """Description of the runs for users, and a list of broken promises."""

    account: list[str]
    broken: list[str]


def main() -> int:
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--max-restarts", "6"]
    ours = [sys.executable, "-m", "elasticrs.launch", "--standalone", "--max-restarts", "3", "--warm", "auto"]
    ours += ["--hang-timeout", "2"]
    with tempfile.TemporaryDirectory(prefix="keep_") as name:
        folder = Path(name)
        undisturbed = run("Undisturbed", ours, folder / "undisturbed.pt", ())
        # Leave the hang out, because torchrun does not notice it. Without the variable, a restarted rank
        # often finds the addresses of the attempt before, and fails (torchrun 2.15).
        theirs = run(
            "torchrun, a checkpoint every 25 steps",
            torchrun,
            folder / "torchrun.pt",
            ("kill", "raise"),
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )
        kept = run("elasticrun, the state is kept", ours, folder / "kept.pt", tuple(ACCIDENTS))
    story = tell(undisturbed, theirs, kept)
    print("\n".join(["", *story.account, *(f"NOT AS PROMISED: {each}" for each in story.broken)]), flush=True)
    return 1 if story.broken else 0


def run(
    title: str, launcher: Sequence[str], checkpoint: Path, accidents: Sequence[str], **variables: str
) -> str:
    """Run the training and return its output. If the job fails, return an empty string."""
    program = [str(Path(__file__).with_name("train.py")), "--checkpoint", str(checkpoint), "--stamps"]
    if accidents:
        program += ["--accidents", *(f"{kind}:{ACCIDENTS[kind]}" for kind in accidents)]
    command = [*launcher, "--nproc-per-node", str(WORKERS), *program]
    print(f"\n{title}:\n$ {' '.join(command)}", flush=True)
    env = {"OMP_NUM_THREADS": "1", **os.environ, **variables}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        assert job.stdout is not None
        lines = []
        for line in job.stdout:
            lines.append(line)
            if not STAMP.search(line):
                sys.stdout.write(line)
                sys.stdout.flush()
    return "".join(lines) if job.returncode == 0 else ""


def tell(undisturbed: str, theirs: str, kept: str) -> Story:
    """Describe the runs from their output, and list the broken promises.

    Args:
        undisturbed: output of the run without accidents.
        theirs: output of torchrun's.
        kept: output of the run with `Keep`.
    """
    costs = [costs_of(text) for text in (theirs, kept)]
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
    ends = [DONE.search(text) for text in (undisturbed, kept)]
    if ends[0] is None or ends[1] is None:
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
    stamps = [
        Stamp(found["what"], *(int(found[name]) for name in ("rank", "attempt", "step", "ns")))
        for found in STAMP.finditer(output)
    ]
    costs = {}
    for accident in (each for each in stamps if each.what in ACCIDENTS):
        before = max(
            (each.step for each in stamps if each.what == "ended" and each.attempt == accident.attempt),
            default=0,
        )
        later = [each for each in stamps if each.attempt > accident.attempt]
        new = [each.ns for each in later if (each.what, each.step) == ("ended", before + 1)]
        starts = [
            each.step for each in later if each.what == "continues" and each.attempt == later[0].attempt
        ]
        if starts and len(new) >= WORKERS:
            costs[accident.what] = Cost(max(0, before - min(starts)), (new[WORKERS - 1] - accident.ns) / 1e9)
    return costs


if __name__ == "__main__":
    sys.exit(main())
