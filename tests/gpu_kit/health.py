"""Checks of the information that elasticrs gets from NVIDIA's driver: GPU health, Xids, and device memory in
use.

On a CPU, they use a library that plays a GPU (``crates/elasticrs-fake-nvml``).
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from .job import CONTEXT_BYTES, LAUNCHER, Context, Figures, Job, Skipped, expect

ROOT = Path(__file__).parents[2]
KERNEL_LOG = "/dev/kmsg"
ILLEGAL_ACCESS = 31


class Driver(NamedTuple):
    """The arguments and variables with which a job finds NVIDIA's driver.

    Attributes:
        launcher: arguments of Python that start the launcher.
        variables: environment variables of the launcher and its workers.
    """

    launcher: tuple[str, ...] = LAUNCHER
    variables: dict[str, str] = {}  # noqa: RUF012 -- never changed


@contextmanager
def driver(context: Context) -> Iterator[Driver]:
    """Provide the driver of this machine or, on a CPU, a driver that simulates a healthy GPU."""
    if context.device == "cuda":
        yield Driver()
        return
    # The kit needs pytest, which this module imports, only on a CPU.
    sys.path.append(str(ROOT / "tests"))
    from helpers.fake_nvml import LIBRARY, FakeGpus

    if not LIBRARY.exists():
        raise Skipped("on a CPU this needs a fake NVML: cargo build -p elasticrs-fake-nvml")
    with closing(FakeGpus(context.folder / "driver")) as gpus:
        yield Driver(gpus.launcher()[1:], gpus.environment)


def expect_watched(job: Job) -> None:
    """Fail the check if the job could not watch the GPUs."""
    for problem in ("reports no Xids", "of device memory is unknown", "their Xids are unknown"):
        expect(problem not in job.output, f"the GPUs were not watched: {job.output}")


def check_nvml(context: Context) -> Figures:
    """Check that the node check finds the GPUs healthy, and that the driver can report a recovery action."""
    with driver(context) as found:
        started = time.monotonic()
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys; from elasticrs._engine.gpus.nvml_check import main; sys.exit(main())",
            ],
            env={**context.environment, **found.variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    seconds = time.monotonic() - started
    lines = done.stdout.splitlines()
    expect(done.returncode == 0 and not done.stderr, f"exit {done.returncode}: {done.stdout}{done.stderr}")
    expect(lines and lines[-1].endswith("fit"), f"no result: {done.stdout}")
    expect("recovery action" not in done.stdout, f"no recovery action: {done.stdout}")
    return {"check_ms": 1e3 * seconds, "says": " | ".join(lines)}


def check_xid(context: Context) -> Figures:
    """Check that the failure report names the Xid of a worker's illegal access to device memory."""
    with (
        driver(context) as found,
        Job(context, [], "xid.py", variables=found.variables, launcher=found.launcher) as job,
    ):
        job.wait("faults")
        job.exits(1)
    expect_watched(job)
    (attempt,) = json.loads(job.report.read_text())["attempts"]
    xids = [xid for xid in attempt["xids"] if xid["code"] == ILLEGAL_ACCESS]
    expect(len(xids) == 1, f"{len(xids)} Xids {ILLEGAL_ACCESS} in {attempt['xids']}")
    expect(xids[0]["action"] == "restart", f"the action is {xids[0]['action']}")
    expect("Xid 31 (GPU 0" in job.output, f"no Xid in the report: {job.output}")
    if context.device == "cpu" or has_kernel_log():
        expect(xids[0]["ranks"] == [0], f"the Xid is of rank {xids[0]['ranks']}")
    return {"count": xids[0]["count"], "ranks": xids[0]["ranks"], "detail": xids[0]["detail"][:60]}


def has_kernel_log() -> bool:
    """Return true if this process can read the kernel log, and uses the same pids as the kernel log."""
    try:
        os.close(os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"


def check_memory_gate(context: Context) -> Figures:
    """Check that workers restart only when the device memory of their predecessors is free."""
    options = ["--max-restarts", "1"]
    with (
        driver(context) as found,
        Job(context, options, "memory_gate.py", variables=found.variables, launcher=found.launcher) as job,
    ):
        (holds,) = job.wait("holds", attempt=0)
        os.kill(holds["pid"], 9)
        killed = time.monotonic()
        (again,) = job.wait("again", attempt=1)
        job.exits()
    expect_watched(job)
    (restarted,) = job.job_events("attempt running")
    phases = json.loads(restarted["metadata"]["metadata"])["phases_ms"]
    figures: Figures = {"kill_to_worker_runs_ms": 1e3 * (again["at"] - killed), "held": again["held"]}
    figures |= {f"{name}_ms": span for name, span in phases.items()}
    expect(again["held"] == 0, f"{again['held']} bytes are still in use")
    if holds["free"] is not None:
        missing = holds["free"] - again["free"]
        expect(missing < CONTEXT_BYTES, f"{missing >> 20} MiB of device memory are still in use")
        figures["missing_mib"] = missing / (1 << 20)
    expect("still hold" not in job.output, f"the memory was not free in time: {job.output}")
    return figures
