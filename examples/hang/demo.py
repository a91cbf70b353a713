"""Trains with four workers, makes one of them wait for a batch that never comes, and describes what happened.

Runs `train.py` through `python -m elasticrs.launch --hang-timeout`, needs nothing but the standard library
itself, and exits with 1 when anything is not as promised: another rank blamed, no stack of it, resumed from
another epoch, an accuracy of 95 % or less.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

WORKERS = 4
EPOCHS = 6
VICTIM = 2
HANG_EPOCH = 3
LIMIT = 3
ACCURACY = 95.0

HUNG = re.compile(r"rank (\d+) \(pid \d+\): hung: (.*); restarting")
RESUMED = re.compile(r"resumed after epoch (\d+)")
FINAL = re.compile(r"final accuracy on held-out data: ([\d.]+)%")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", type=Path, help="directory for checkpoint and logs, kept afterwards")
    arguments = parser.parse_args()
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        return run(arguments.keep)
    with tempfile.TemporaryDirectory(prefix="hang_") as directory:
        return run(Path(directory))


def run(directory: Path) -> int:
    (directory / "digits.pt").unlink(missing_ok=True)
    command = [sys.executable, "-m", "elasticrs.launch", "--standalone", "--max-restarts", "2"]
    command += ["--hang-timeout", str(LIMIT), "--log-dir", str(directory / "logs")]
    command += ["--nproc-per-node", str(WORKERS), str(Path(__file__).with_name("train.py"))]
    command += ["--checkpoint", str(directory / "digits.pt"), "--epochs", str(EPOCHS)]
    command += ["--hang-rank", str(VICTIM), "--hang-epoch", str(HANG_EPOCH)]
    print("$", " ".join(["python", *command[1:]]), flush=True)

    env = {"OMP_NUM_THREADS": "1", **os.environ}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        assert job.stdout is not None
        lines = []
        for line in job.stdout:
            lines.append(line)
            sys.stdout.write(line)
            sys.stdout.flush()
    kept = sorted((directory / "logs").glob(f"*/attempt_0/{VICTIM}/hang.txt"))
    story = tell(job.returncode, lines, kept[-1].read_text() if kept else "")
    print("\n".join(["", *story.account, *(f"NOT AS PROMISED: {each}" for each in story.broken)]), flush=True)
    return 1 if story.broken else 0


class Story(NamedTuple):
    """Description of a run for users, and a list of broken promises."""

    account: list[str]
    broken: list[str]


def tell(exitcode: int, lines: Sequence[str], evidence: str) -> Story:
    """Describe a run, and check what was promised.

    Args:
        exitcode: of the launcher.
        lines: what it printed.
        evidence: what was kept of the rank that hung.
    """
    text = "".join(lines)
    account: list[str] = []
    broken = [] if exitcode == 0 else [f"the launcher ended with exit code {exitcode}"]
    hung = HUNG.search(text)
    if hung is None:
        broken.append("nobody was found to hang")
    else:
        account += [f"rank {hung[1]} hung: {hung[2]}"]
        if int(hung[1]) != VICTIM:
            broken.append(f"not rank {VICTIM} was blamed, but rank {hung[1]}")
    stack = [line.strip() for line in evidence.partition("Current thread")[2].splitlines()[1:]]
    frames = stack[: stack.index("")] if "" in stack else stack
    if any("in hang_if_told" in frame for frame in frames):
        account += ["its stack, kept before it was ended:", *(f"  {frame}" for frame in frames)]
    else:
        broken.append("its stack was not kept")
    resumed = [int(epoch) for epoch in RESUMED.findall(text)]
    account += [f"training resumed after epoch {epoch}, from its checkpoint" for epoch in resumed]
    if resumed != [HANG_EPOCH - 1]:
        broken.append(f"resumed after epochs {resumed}, not once after epoch {HANG_EPOCH - 1}")
    final = FINAL.search(text)
    if final is None:
        broken.append("no final accuracy")
    else:
        account.append(f"final accuracy on held-out data: {final[1]} %, after {EPOCHS} epochs")
        if float(final[1]) <= ACCURACY:
            broken.append(f"the accuracy is not above {ACCURACY} %")
    return Story(["What happened", *(f"  {line}" for line in account)], broken)


if __name__ == "__main__":
    sys.exit(main())
