"""Trains with four workers, makes one of them die in epoch 3, and describes what happened.

Runs `train.py` through `python -m elasticrs.launch`, needs nothing but the standard library itself, and exits
with 1 when anything is not as promised: no restart, resumed from another epoch, an accuracy of 95 % or less.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

WORKERS = 4
EPOCHS = 8
VICTIM = 2
KILL_EPOCH = 3
ACCURACY = 95.0

STAMP = re.compile(
    r"stamp (?P<what>up|trains|dies) rank=(?P<rank>\d+) attempt=(?P<attempt>\d+) ns=(?P<ns>\d+)"
)
RESUMED = re.compile(r"resumed after epoch (\d+)")
FINAL = re.compile(r"final accuracy on held-out data: ([\d.]+)%")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", type=Path, help="directory for checkpoint and timeline, kept afterwards")
    arguments = parser.parse_args()
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        return run(arguments.keep)
    with tempfile.TemporaryDirectory(prefix="ddp_digits_") as directory:
        return run(Path(directory))


def run(directory: Path) -> int:
    timeline = directory / "timeline.jsonl"
    for old in (timeline, directory / "digits.pt"):
        old.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "elasticrs.launch",
        "--standalone",
        "--max-restarts",
        "2",
        "--warm",
        "auto",
    ]
    command += ["--nproc-per-node", str(WORKERS), str(Path(__file__).with_name("train.py"))]
    command += ["--checkpoint", str(directory / "digits.pt"), "--epochs", str(EPOCHS), "--stamps"]
    command += ["--kill-rank", str(VICTIM), "--kill-epoch", str(KILL_EPOCH)]
    print("$", " ".join(["python", *command[1:]]), flush=True)

    env = {"OMP_NUM_THREADS": "1", **os.environ, "ELASTICRS_TIMELINE": str(timeline)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        lines = []
        for line in job.stdout:
            lines.append(line)
            if not STAMP.search(line):
                sys.stdout.write(line)
                sys.stdout.flush()
    records = [json.loads(line) for line in timeline.read_text().splitlines()] if timeline.exists() else []
    story = tell(job.returncode, lines, records)
    print("\n".join(["", *story.account, *(f"NOT AS PROMISED: {each}" for each in story.broken)]), flush=True)
    return 1 if story.broken else 0


# --- the account ---


class Story(NamedTuple):
    """Description of a run for users, and a list of broken promises."""

    account: list[str]
    broken: list[str]


def tell(exitcode: int, lines: Sequence[str], records: Sequence[Mapping[str, Any]]) -> Story:
    """Describe a run, and check what was promised.

    Args:
        exitcode: of the launcher.
        lines: what it printed, the stamps of the workers included.
        records: the agent's timeline.
    """
    text = "".join(lines)
    stamps = [match.groupdict() for match in STAMP.finditer(text)]
    death = next((int(each["ns"]) for each in stamps if each["what"] == "dies"), None)
    failures = [record for record in records if record["event"] == "failure_seen"]
    account: list[str] = []
    broken = [] if exitcode == 0 else [f"the launcher ended with exit code {exitcode}"]

    if death is None or not failures:
        broken.append("no worker died" if death is None else "the agent's timeline shows no failure")
    else:
        failure = failures[0]
        rank = failure["local_rank"]
        account.append(f"rank {rank} was killed by SIGKILL in the middle of epoch {KILL_EPOCH}")
        if (rank, failure["exitcode"]) != (VICTIM, -9):
            broken.append(f"the first failure is not the SIGKILL of rank {VICTIM}: {dict(failure)}")
        account += _times(death, records, stamps)
        if not any(record["event"] == "started" and record["restart_count"] == 1 for record in records):
            broken.append("no restart")

    resumed = [int(epoch) for epoch in RESUMED.findall(text)]
    account += [f"training resumed after epoch {epoch}, from its checkpoint" for epoch in resumed]
    if resumed != [KILL_EPOCH - 1]:
        broken.append(f"resumed after epochs {resumed}, not once after epoch {KILL_EPOCH - 1}")

    final = FINAL.search(text)
    if final is None:
        broken.append("no final accuracy")
    else:
        account.append(f"final accuracy on held-out data: {final[1]} %, after {EPOCHS} epochs")
        if float(final[1]) <= ACCURACY:
            broken.append(f"the accuracy is not above {ACCURACY} %")
    return Story(["What happened", *(f"  {line}" for line in account)], broken)


def _times(
    death: int, records: Sequence[Mapping[str, Any]], stamps: Sequence[Mapping[str, str]]
) -> list[str]:
    """Return a line for each step of the recovery, with its time in milliseconds after the worker's death."""
    steps = [
        ("seen by the agent", "failure_seen", None),
        (f"the other {WORKERS - 1} workers signalled", "siblings_signalled", None),
        ("nothing of the first attempt left", "group_ended", None),
        (f"{WORKERS} new workers started", "started", 1),
    ]
    found = []
    for text, event, restarts in steps:
        of_step = [
            record["ns"]
            for record in records
            if record["event"] == event
            and record["ns"] >= death
            and restarts in {None, record["restart_count"]}
        ]
        found += [(text, of_step[0])] if of_step else []
    for what, text in (("up", "all of them past their imports"), ("trains", "their first step done")):
        told = [int(each["ns"]) for each in stamps if each["what"] == what and each["attempt"] == "1"]
        if len(told) == WORKERS:
            found.append((text, max(told)))
    return [f"{(ns - death) / 1e6:8.1f} ms: {text}" for text, ns in found]


if __name__ == "__main__":
    sys.exit(main())
