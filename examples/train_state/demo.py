"""Trains with four workers, kills one of them in the middle of a step, and describes what happened.

Runs `train.py` through `python -m elasticrs.launch` twice, the first time undisturbed. Exits with 1 when
anything is not as promised: another worker was restarted, more than one step was repeated, or the end is
another one.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

WORKERS = 4
VICTIM = 2
KILL_STEP = 60

STAMP = re.compile(
    r"stamp (?P<what>begins|dies|done) rank=(\d+) pid=(?P<pid>\d+) step=(?P<step>\d+) ns=(?P<ns>\d+)"
)
FINAL = re.compile(r"final accuracy on held-out data: ([\d.]+)%, parameters (\w+)")


class Stamp(NamedTuple):
    """A line that a worker prints when it begins a step, dies in it, or has completed it."""

    what: str
    pid: int
    step: int
    ns: int


def main() -> int:
    print("Undisturbed:", flush=True)
    undisturbed = run()
    print(f"\nThe same, and rank {VICTIM} is killed in step {KILL_STEP}:", flush=True)
    killed = run("--kill-rank", str(VICTIM), "--kill-step", str(KILL_STEP))
    account, broken = tell(undisturbed, killed)
    print("\n".join(["", "What happened", *(f"  {line}" for line in account)]))
    print("".join(f"NOT AS PROMISED: {each}\n" for each in broken), end="", flush=True)
    return 1 if broken else 0


def run(*more: str) -> str:
    """Run the job and return its output. If the job fails, return an empty string."""
    command = [sys.executable, "-m", "elasticrs.launch", "--standalone", "--nproc-per-node", str(WORKERS)]
    command += ["--max-restarts", "2", "--on-failure", "replace", "--warm", "auto"]
    command += [str(Path(__file__).with_name("train.py")), "--stamps", *more]
    print("$", " ".join(["python", *command[1:]]), flush=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        lines = []
        for line in job.stdout:
            lines.append(line)
            if not STAMP.search(line):
                sys.stdout.write(line)
                sys.stdout.flush()
    return "".join(lines) if job.returncode == 0 else ""


def tell(undisturbed: str, killed: str) -> tuple[list[str], list[str]]:
    """Describe the two runs from their output, and list the broken promises."""
    ends = [FINAL.search(text) for text in (undisturbed, killed)]
    if ends[0] is None or ends[1] is None:
        return [], ["a job failed"]
    stamps = [
        Stamp(found["what"], int(found["pid"]), int(found["step"]), int(found["ns"]))
        for found in STAMP.finditer(killed)
    ]
    death = next((each for each in stamps if each.what == "dies"), None)
    if death is None:
        return [], ["no worker died"]
    before = {each.pid for each in stamps if each.ns <= death.ns}
    after = {each.pid for each in stamps if each.ns > death.ns and each.what == "done"}
    stayed = before & after
    account = [
        f"pid {death.pid} was killed by SIGKILL in the middle of step {death.step}",
        f"{len(stayed)} other workers went on: pids {', '.join(map(str, sorted(stayed)))}; in its place came "
        f"pid {', '.join(map(str, sorted(after - before)))}",
        f"{gap(stamps, death):8.1f} ms from the kill to the end of the next step in all {WORKERS}",
    ]
    broken = []
    if len(stayed) != WORKERS - 1 or len(after - before) != 1:
        broken.append(
            f"of {sorted(before)} the pids {sorted(stayed)} are left, and {sorted(after - before)} new"
        )
    repeated = sorted({each.step for each in stamps if began(stamps, each) > 1})
    account.append(f"steps that were begun twice: {', '.join(map(str, repeated))}; none was left out")
    done = {each.step for each in stamps if each.what == "done"}
    if repeated != [death.step]:
        broken.append(f"steps {repeated} were repeated")
    if done != set(range(1, max(done) + 1)):
        broken.append("a step was left out")
    for text, end in zip(("undisturbed", "with the kill"), ends, strict=True):
        account.append(f"{text}: accuracy {end[1]} %, parameters {end[2][:16]}...")
    if ends[0].groups() != ends[1].groups():
        broken.append("the two runs have ended differently")
    return account, broken


def began(stamps: Sequence[Stamp], of: Stamp) -> int:
    """Return how often a worker started a step."""
    return sum(each.what == "begins" and (each.pid, each.step) == (of.pid, of.step) for each in stamps)


def gap(stamps: Sequence[Stamp], death: Stamp) -> float:
    """Return the milliseconds from a worker's death until all workers have completed the interrupted step."""
    return (
        max(each.ns for each in stamps if each.what == "done" and each.step == death.step + 1) - death.ns
    ) / 1e6


if __name__ == "__main__":
    sys.exit(main())
