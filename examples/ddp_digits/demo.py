"""Trains with four workers, makes one of them die in epoch 3, and describes what happened.

Runs `train.py` through `python -m elasticrs.launch`, needs nothing but the standard library itself, and exits
with 1 when anything is not as promised: no restart, resumed from another epoch, an accuracy of 95 % or less.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
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
    parser.add_argument("--keep", type=Path, help="directory for checkpoint and events, kept afterwards")
    arguments = parser.parse_args()
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        return run(arguments.keep)
    with tempfile.TemporaryDirectory(prefix="ddp_digits_") as directory:
        return run(Path(directory))


def run(directory: Path) -> int:
    events = directory / "events.jsonl"
    for old in (events, directory / "digits.pt"):
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
        "--event-log-handler",
        f"file:{events}",
    ]
    command += ["--nproc-per-node", str(WORKERS), str(Path(__file__).with_name("train.py"))]
    command += ["--checkpoint", str(directory / "digits.pt"), "--epochs", str(EPOCHS), "--stamps"]
    command += ["--kill-rank", str(VICTIM), "--kill-epoch", str(KILL_EPOCH)]
    print("$", " ".join(["python", *command[1:]]), flush=True)

    env = {"OMP_NUM_THREADS": "1", **os.environ}
    clock = time.time() * 1000 - time.monotonic_ns() / 1e6
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        lines = []
        for line in job.stdout:
            lines.append(line)
            if not STAMP.search(line):
                sys.stdout.write(line)
                sys.stdout.flush()
    records = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    story = tell(job.returncode, lines, records, clock)
    print("\n".join(["", *story.account, *(f"NOT AS PROMISED: {each}" for each in story.broken)]), flush=True)
    return 1 if story.broken else 0


# --- the account ---


class Story(NamedTuple):
    """Description of a run for users, and a list of broken promises."""

    account: list[str]
    broken: list[str]


def tell(exitcode: int, lines: Sequence[str], events: Sequence[Mapping[str, Any]], clock: float) -> Story:
    """Describe a run, and list the promises that the run broke.

    Args:
        exitcode: exit code of the launcher.
        lines: output of the launcher, which includes the workers' timestamps.
        events: the agent's events.
        clock: milliseconds by which the clock of the events is ahead of the clock of the workers' timestamps.
    """
    text = "".join(lines)
    stamps = [match.groupdict() for match in STAMP.finditer(text)]
    death = next((int(each["ns"]) / 1e6 for each in stamps if each["what"] == "dies"), None)
    killed = [rank for rank, code in _ends(events) if code == -signal.SIGKILL]
    restart = next((each for each in events if each["name"] == "attempt running" and _count(each) == 1), None)
    account: list[str] = []
    broken = [] if exitcode == 0 else [f"the launcher ended with exit code {exitcode}"]

    if death is None:
        broken.append("no worker died")
    elif killed != [VICTIM]:
        broken.append(f"the agent saw no SIGKILL of rank {VICTIM} alone, but of ranks {killed}")
    elif restart is None:
        broken.append("no restart")
    else:
        account.append(f"rank {VICTIM} was killed by SIGKILL in the middle of epoch {KILL_EPOCH}")
        account += _times(death, restart, clock, stamps)

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


def _count(event: Mapping[str, Any]) -> int:
    """Return the number of restarts before an event."""
    count: int = event["metadata"]["agent_restarts"]
    return count


def _ends(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int]]:
    """Yield the local rank and the exit code of each worker that failed in the first attempt."""
    for event in events:
        if event["name"] == "torchelastic.worker.status.FAILED" and _count(event) == 0:
            about = json.loads(event["metadata"]["metadata"])
            yield about["local_rank"][0], about["exit_code"][0]


def _times(
    death: float, restart: Mapping[str, Any], clock: float, stamps: Sequence[Mapping[str, str]]
) -> list[str]:
    """Return a line for each step of the recovery, with its time in milliseconds after the worker's death."""
    phases = json.loads(restart["metadata"]["metadata"])["phases_ms"]
    at = restart["timestamp"] - clock - restart["metadata"]["duration_ms"]
    found = [("seen by the agent", at)]
    for name, text in (
        ("signalling", f"the other {WORKERS - 1} workers signalled"),
        ("stopping", "nothing of the first attempt left"),
    ):
        at += phases[name]
        found.append((text, at))
    found.append((f"{WORKERS} new workers started", restart["timestamp"] - clock))
    for what, text in (("up", "all of them past their imports"), ("trains", "their first step done")):
        told = [int(each["ns"]) / 1e6 for each in stamps if each["what"] == what and each["attempt"] == "1"]
        if len(told) == WORKERS:
            found.append((text, max(told)))
    return [f"{max(0.0, at - death):8.0f} ms: {text}" for text, at in found]


if __name__ == "__main__":
    sys.exit(main())
