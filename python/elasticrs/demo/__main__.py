"""Trains a small model with four workers, lets one of them be killed and another one hang, and tells how much
time and how many training steps this cost.

``python -m elasticrs.demo`` needs torch and about ten seconds on two cores. It uses no GPU and no network. It
exits with 1 if something is not as promised: a training step was lost, another rank was blamed for the hang,
or the model did not learn.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

WORKERS = 4
ACCURACY = 95.0
WORDS = {"killed": "was killed by SIGKILL", "hung": "began to wait for a batch that never comes"}


class Accident(NamedTuple):
    """A failure of a worker: its rank, the training step in which it fails, and how (a key of ``WORDS``)."""

    rank: int
    step: int
    what: str


ACCIDENTS = (Accident(2, 101, "killed"), Accident(1, 201, "hung"))
"""The failures that end the first attempt of the job and the second one."""


def main() -> int:
    """Run the demo in a temporary folder. Return the exit code."""
    if importlib.util.find_spec("torch") is None:
        print("the demo needs torch: pip install torch (a build for CPUs is enough)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="elasticrs_demo_") as folder:
        return run(Path(folder))


def run(folder: Path) -> int:
    """Run the training with the launcher, and print what happened. Return the exit code.

    Args:
        folder: an empty folder for the files in which the agent and the workers record what happens.
    """
    records, events = folder / "records.jsonl", folder / "events.jsonl"
    options = ["--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=3", "--hang-timeout=2"]
    options += ["--warm=auto", f"--event-log-handler=file:{events}"]
    # Run a copy of the script, because the launcher's reports do not name lines of the package elasticrs.
    script = Path(shutil.copy(Path(__file__).with_name("train.py"), folder))
    print(f"$ elasticrun {' '.join(options[:-1])} {script.name}", flush=True)
    variables = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:Failed to initialize NumPy"}
    variables |= {"ELASTICRS_DEMO_RECORDS": str(records), "ELASTICRS_DEMO_ACCIDENTS": json.dumps(ACCIDENTS)}
    command = [sys.executable, "-m", "elasticrs.launch", *options, str(script)]
    job = subprocess.run(command, env={**os.environ, **variables}, check=False)
    story = tell(job.returncode, _read(records), _read(events))
    print("\n".join(["", *story.account, *(f"NOT AS PROMISED: {each}" for each in story.broken)]), flush=True)
    return 1 if story.broken else 0


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class Story(NamedTuple):
    """What the demo tells about the job: an account of what happened, and the promises that were broken."""

    account: list[str]
    broken: list[str]


def tell(code: int, records: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> Story:
    """Tell what happened in the job, and which promises it broke.

    Args:
        code: exit code of the launcher.
        records: what the workers recorded (see ``record`` in ``train.py``), in the order of time.
        events: events that the agent recorded (``--event-log-handler``).
    """
    account = ["What happened"]
    broken = [] if code == 0 else [f"the launcher ended with exit code {code}"]
    hangs = [json.loads(each["metadata"]["metadata"]) for each in events if each["name"] == "worker hung"]
    for attempt, (rank, step, what) in enumerate(ACCIDENTS, start=1):
        failed = f"rank {rank} {WORDS[what]}"
        began = [each for each in records if each["what"] == what]
        running = [
            each for each in events if each["name"] == "attempt running" and _restarts(each) == attempt
        ]
        again = [each for each in records if each["what"] == "trains" and each["attempt"] == attempt]
        if not began or not running or len(again) != WORKERS:
            broken.append(f"no recovery after {failed}")
            continue
        started = running[0]["timestamp"] / 1000
        lost = step - 1 - min(each["step"] for each in again)
        times = {
            "elasticrs knew which rank it was": started - running[0]["metadata"]["duration_ms"] / 1000,
            f"{WORKERS} new workers ran": started,
            f"all of them had done a step, and {lost} steps were lost": max(each["time"] for each in again),
        }
        account.append(f"  in step {step}, {failed}")
        if what == "hung":
            if [each["worker_pid"] for each in hangs] != [str(began[0]["pid"])]:
                broken.append(f"another worker was blamed, although {failed}: {hangs}")
            for each in hangs:
                account += textwrap.wrap(each["message"], 80, initial_indent="    ", subsequent_indent="    ")
        account += [
            f"  {max(0.0, at - began[0]['time']) * 1000:7.0f} ms: {text}" for text, at in times.items()
        ]
        if lost:
            broken.append(f"{lost} steps were lost after {failed}")
    accuracy = next((each["accuracy"] for each in records if each["what"] == "ended"), 0.0)
    account.append(
        f"  at the end, the model is right about {accuracy:.1f} % of points that it had never seen"
    )
    if accuracy < ACCURACY:
        broken.append(f"the accuracy is below {ACCURACY} %")
    return Story(account, broken)


def _restarts(event: Mapping[str, Any]) -> int:
    restarts: int = event["metadata"]["agent_restarts"]
    return restarts


if __name__ == "__main__":
    sys.exit(main())
