"""The checks of the kit. Each check returns its measurements, or raises an exception of :mod:`.job`."""

import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from .health import check_memory_gate, check_nvml, check_xid
from .job import CONTEXT_BYTES, PROGRAMS, Context, Figures, Job, Skipped, expect

MULTI_RANK = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
MULTI_RANK_SINCE = (2, 30)
"""First version of NCCL in which several ranks can share a GPU."""


def check_kernel(context: Context) -> Figures:
    """Check that a launch works or, if the kernel has no pidfds, that it fails with a clear message."""
    has_pidfds = True
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        has_pidfds = False
    command = [sys.executable, "-m", "elasticrs.launch", "--standalone", str(PROGRAMS / "plain.py")]
    before = time.monotonic()
    done = subprocess.run(
        command, env=context.environment, capture_output=True, text=True, timeout=60, check=False
    )
    figures = {"kernel": platform.release(), "pidfds": has_pidfds, "launch_s": time.monotonic() - before}
    if has_pidfds:
        expect((done.returncode, done.stdout) == (0, "ran\n"), f"exit {done.returncode}: {done.stderr}")
        return figures
    expect(done.returncode != 0, "the launch succeeded on a kernel without pidfds")
    expect("pidfd" in done.stderr and "Traceback" not in done.stderr, f"no clear line: {done.stderr}")
    return {**figures, "says": done.stderr.strip()}


def check_count(context: Context) -> Figures:
    """Check that there is one worker for each device, and that each worker has its own device."""
    word = "gpu" if context.device == "cuda" else "cpu"
    with Job(context, ["--nproc-per-node", word], "count.py") as job:
        (first,) = job.wait("counted")
        seen = job.wait("counted", first["count"])
        job.exits()
    devices = {each["device"] for each in seen}
    expect(len(job.seen) == len(devices) == first["count"], f"{len(job.seen)} workers on {sorted(devices)}")
    return {"devices": first["count"]}


def check_warm(context: Context) -> Figures:
    """Check that workers forked from a nursery that has imported torch can use the device, also after a
    restart.
    """
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--warm", "torch"]
    with Job(context, options, "warm.py") as job:
        victim = job.wait("used", 2, attempt=0)[1]
        os.kill(victim["pid"], 9)
        killed = time.monotonic()
        again = job.wait("used", 2, attempt=1)
        job.exits()
    for each in job.seen:
        expect(each["is_warm"], "a worker started without the imports of the nursery")
        expect(not each["was_initialized"], "CUDA was initialized before the fork")
        expect(not each["parent_uses_gpu"], "the nursery has a device of the GPU driver open")
    return {"kill_to_device_used_ms": 1e3 * (max(each["at"] for each in again) - killed)}


def check_killed_kernel(context: Context) -> Figures:
    """Check that the device memory of a worker that was killed during a kernel is free when the next attempt
    starts.
    """
    with Job(context, ["--max-restarts", "1"], "running_kernel.py") as job:
        (running,) = job.wait("running")
        os.kill(running["pid"], 9)
        killed = time.monotonic()
        (again,) = job.wait("restarted")
        job.exits()
    figures: Figures = {"kill_to_device_used_ms": 1e3 * (again["at"] - killed)}
    if running["free"] is not None:
        missing = running["free"] - again["free"]
        expect(missing < CONTEXT_BYTES, f"{missing >> 20} MiB of device memory are still in use")
        figures["missing_mib"] = missing / (1 << 20)
    return figures


def several_ranks(context: Context, number: int) -> dict[str, str]:
    """Return the environment variables that ``number`` ranks need. Raise ``Skipped`` if GPUs are missing."""
    if context.nccl is None or context.gpus >= number:
        return {}
    if context.nccl < MULTI_RANK_SINCE:
        have = ".".join(map(str, context.nccl))
        raise Skipped(f"{number} ranks need {number} GPUs, or NCCL 2.30 to share one; here: NCCL {have}")
    return MULTI_RANK


def check_replace(number: int) -> Callable[[Context], Figures]:
    """Return a check in which one of ``number`` workers is replaced."""

    def check(context: Context) -> Figures:
        """Check that the final sum is exact although one worker is killed during a step and replaced."""
        options = ["--nproc-per-node", str(number), "--max-restarts", "1", "--on-failure", "replace"]
        options += ["--warm", "auto"]
        with Job(
            context, options, "replace.py", [str(number)], variables=several_ranks(context, number)
        ) as job:
            (death,) = job.wait("dies")
            before = len([event for event in job.seen if event["what"] == "met"])
            met = job.wait("met", before + number)[before:]
            trained = job.wait("trained", number)
            job.exits()
        for each in trained:
            expect(each["value"] == each["step"] == 40, f"trained to {each['value']} in {each['step']} steps")
        return {"kill_to_regrouped_ms": 1e3 * (max(each["at"] for each in met) - death["at"])}

    return check


def check_abort(context: Context) -> Figures:
    """Check that a new group works after a thread has aborted a collective that was waiting."""
    number = 2
    try:
        variables = several_ranks(context, number)
    except Skipped:
        number, variables = 1, {}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Job(
        context, ["--nproc-per-node", str(number)], "abort.py", [str(number), str(port)], variables
    ) as job:
        ended = job.wait("aborted", number)
        job.exits()
    for each in ended:
        expect(each["total"] == number, f"the new group summed to {each['total']}, not {number}")
        expect(each["error"] != "the collective returned without an error", each["error"])
    waited = next(each for each in ended if each["rank"] == 0)
    return {"ranks": number, "abort_to_error_ms": 1e3 * waited["seconds"]}


def check_watchdog(context: Context) -> Figures:
    """Check that a collective's timeout kills the process, writes NCCL's dump, and restarts the job."""
    ranks, limit = ("1", 5.0) if context.device == "cuda" else ("2", 3.0)
    variables = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(context.folder / "dump_"),
        # Behind an endless kernel, the abort of the communicator never returns. The process then exits only
        # when the heartbeat of NCCL's watchdog is overdue, by default after 480 s.
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "12",
    }
    options = ["--nproc-per-node", ranks, "--max-restarts", "1"]
    with Job(context, options, "watchdog.py", [str(limit)], variables) as job:
        (waiting,) = job.wait("waiting", attempt=0)
        (again, *_) = job.wait("again", int(ranks), attempt=1)
        job.exits()
    figures: Figures = {"limit_s": limit, "wait_to_restarted_s": again["at"] - waiting["at"]}
    if context.device == "cuda":
        dumps = sorted(context.folder.glob("dump_*"))
        expect(dumps, "the watchdog ended the process without a flight recorder dump")
        figures["dump_bytes"] = dumps[0].stat().st_size
    return figures


def check_flight_recorder(context: Context) -> Figures:
    """Check that a worker can read torch's flight recorder while the job is running."""
    variables = {"TORCH_FR_BUFFER_SIZE": "2000"}
    with Job(context, [], "flight_recorder.py", variables=variables) as job:
        (recorded,) = job.wait("recorded")
        job.exits()
    names = [name for name in recorded["names"] if "all_reduce" in name]
    expect(len(names) == 3, f"recorded {recorded['names']}, not three all_reduce")
    return {"entries": len(recorded["names"]), "bytes": recorded["bytes"]}


def check_hang(context: Context) -> Figures:
    """Check that ``--hang-timeout`` detects an endless kernel, saves the stack and restarts the job. The
    rank may count as slow first, because waiting for the device uses the CPU. In this case, it counts as hung
    after ten times the limit.
    """
    with Job(context, ["--max-restarts", "1", "--hang-timeout", "1"], "hang.py") as job:
        (stepped,) = job.wait("stepped", attempt=0)
        (again,) = job.wait("stepped", attempt=1)
        job.exits()
    expect(len(job.job_events("worker hung")) == 1, "no event 'worker hung'")
    stacks = [path.read_text() for path in (context.folder / "logs").rglob("hang.txt")]
    expect(any("wait_for_device" in stack for stack in stacks), "no stack of the hung worker was kept")
    return {"limit_s": 1.0, "last_step_to_restarted_s": again["at"] - stepped["at"]}


def check_keep(context: Context) -> Figures:
    """Check that a training on the device that a SIGKILL has interrupted ends as one without, bit by bit."""
    number, kill_step, every = 2, 17, 5
    try:
        variables = several_ranks(context, number)
    except Skipped:
        number, variables = 1, {}
    options = ["--nproc-per-node", str(number), "--max-restarts", "1", "--warm", "auto"]
    with Job(context, options, "keep.py", [str(number - 1), str(kill_step)], variables) as job:
        (death,) = job.wait("dies")
        begun = job.wait("begins", number, attempt=1)
        trained = job.wait("trained", number, attempt=1)
        job.exits()
    (step,) = {each["step"] for each in begun}
    expect(0 <= kill_step - step <= every + 1, f"step {step} was restored after a kill in step {kill_step}")
    expect(all(each["exact"] for each in begun), "the restored state was not exact")
    expect(all(each["equal"] for each in trained), "the end is not that of a training without a failure")
    restored = max(each["at"] for each in begun)
    return {
        "ranks": number,
        "steps_lost": kill_step - step,
        "kill_to_restored_ms": 1e3 * (restored - death["at"]),
    }


def check_keep_events(context: Context) -> Figures:
    """Check the rule of two events: whether it recognizes each copy that was made during a change."""
    trials = 1000 if context.device == "cuda" else 200
    with Job(context, [], "keep_events.py", [str(trials)]) as job:
        (ruled,) = job.wait("ruled")
        job.exits()
    expect(ruled["used"] > 0, "no copy was used")
    expect(ruled["wrong"] == 0, f"{ruled['wrong']} of {ruled['used']} used copies are of no step")
    names = ("used", "not_begun", "refused", "refused_and_changed")
    return {name: ruled[name] for name in names}


def check_keep_slots(context: Context) -> Figures:
    """Check that CUDA can register the agent's memory, and copy into it while another stream is occupied."""
    size = (1 << 30) if context.device == "cuda" else (16 << 20)
    with Job(context, ["--max-restarts", "1"], "keep_slots.py", [str(size)]) as job:
        (first,) = job.wait("copied", attempt=0)
        (again,) = job.wait("copied", attempt=1)
        job.exits()
    for each in (first, again):
        expect(each["equal"], "the copy is not equal")
        expect(not each["waited"], "the copy has waited for the other stream")
    expect(again["was_there"] and not first["was_there"], "the slot did not outlive the worker")
    names = ("register_s_per_gb", "plain_gb_s", "registered_gb_s", "beside_gb_s")
    return {**{name: first[name] for name in names}, "register_again_s_per_gb": again["register_s_per_gb"]}


CHECKS: dict[str, Callable[[Context], Figures]] = {
    "kernel": check_kernel,
    "count": check_count,
    "warm": check_warm,
    "killed-kernel": check_killed_kernel,
    "nvml": check_nvml,
    "xid": check_xid,
    "memory-gate": check_memory_gate,
    "hang": check_hang,
    "flight-recorder": check_flight_recorder,
    "watchdog": check_watchdog,
    "abort": check_abort,
    "replace-1": check_replace(1),
    "replace-2": check_replace(2),
    "replace-4": check_replace(4),
    "keep": check_keep,
    "keep-events": check_keep_events,
    "keep-slots": check_keep_slots,
}
"""All checks, in the order in which they run. If "kernel" finds no pidfds, all others are skipped."""
