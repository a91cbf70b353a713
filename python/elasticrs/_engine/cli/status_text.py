"""Turns the status of a job into the lines that ``elasticctl`` shows. Does no input or output itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elasticrs._engine.job.phrases import attempt_text, duration, printable, ranks_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_STATES = {
    "INIT": "starting",
    "HEALTHY": "running",
    "NO_PROGRESS": "no progress",
    "UNHEALTHY": "failing",
    "STOPPED": "between attempts",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
}
MAX_SHOWN = 16
"""Maximum number of remarks about ranks, and of rows in the table of ranks."""

UNKNOWN = "-"


def state_of(status: Mapping[str, Any]) -> str:
    state = str(status.get("state"))
    return _STATES.get(state, state)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the columns of ``rows``, the first of which has the titles."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


TITLES = ("JOB", "SCRIPT", "STATE", "NODES", "RANKS", "STEP", "LAST STEP", "RUNNING", "RESTARTS", "PID")


def row(pid: int, status: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return a job's row in the table of all jobs."""
    if status is None:
        return (*(UNKNOWN,) * 2, "does not answer", *(UNKNOWN,) * 6, str(pid))
    job, group = status["job"], status["group"] or {}
    last, age = last_step(status)
    return (
        printable(str(job["run_id"]), 40),
        printable(os.path.basename(str(job["name"])), 40),
        state_of(status),
        str(group.get("world_size", UNKNOWN)),
        str(group.get("workers", UNKNOWN)),
        _step_text(last, status),
        UNKNOWN if age is None else duration(age),
        duration(status["agent"]["uptime_seconds"]),
        f"{status['restarts']} of {job['max_restarts']}",
        str(pid),
    )


def _progress(worker: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a worker's last step with its age. Before its first step there is only a heartbeat."""
    return worker.get("progress") or worker.get("heartbeat") or {}


def _counts_attempt(progress: Mapping[str, Any]) -> bool:
    """Return true if the steps are counted from 0 in each attempt."""
    return progress.get("counts") == "optimizer"


def last_step(status: Mapping[str, Any]) -> tuple[Mapping[str, Any], float | None]:
    """Return the progress of the foremost rank, and the seconds since the last progress of any rank. Steps
    that are counted across restarts come before those of the attempt.
    """
    told = [_progress(worker) for worker in status["workers"]]
    known = [each for each in told if each.get("step") is not None]
    ages = [each["age_seconds"] for each in told if each.get("age_seconds") is not None]
    last = max(known, key=lambda each: (not _counts_attempt(each), each["step"]), default={})
    return last, min(ages, default=None)


def _step_text(progress: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    if progress.get("step") is None:
        return UNKNOWN
    has_restarted = status["attempt"] not in (None, "0")
    which = " of this attempt" if has_restarted and _counts_attempt(progress) else ""
    return f"{progress['step']:,}{which}"


def sentence(status: Mapping[str, Any]) -> str:
    """Return one line about the state of the job: size, step, running time, and restarts."""
    group, job = status["group"] or {}, status["job"]
    parts = [state_of(status)]
    if group:
        nodes, ranks = group["world_size"], group["workers"]
        parts[0] += f" with {ranks} rank{'s' if ranks != 1 else ''}"
        parts[0] += f" on {nodes} nodes" if nodes != 1 else ""
    last, age = last_step(status)
    if last:
        parts.append(f"step {_step_text(last, status)}{'' if age is None else f', {duration(age)} ago'}")
    elif age is not None:
        parts.append("before its first step")
    parts.append(f"for {duration(status['agent']['uptime_seconds'])}")
    parts.append(f"{status['restarts']} of {job['max_restarts']} restarts used")
    name, run_id = printable(os.path.basename(str(job["name"]))), printable(str(job["run_id"]))
    return f"{name} (job {run_id}): {', '.join(parts)}"


def remarks(status: Mapping[str, Any]) -> list[str]:
    """Return lines about what a user should look at, most important first, with commands that tell more."""
    found = []
    agent = status["agent"]
    if not agent["alive"]:
        found.append(f"the agent does not work: {agent['reason']} (its pid is {agent['pid']})")
    if status["no_progress"]:
        found.append(f"{printable(str(status['no_progress']['what']), 1000)}; see elasticctl stacks")
    found += _odd_ranks(status["workers"])
    slowest = status["slowest"]
    if slowest:
        rates = f"{slowest['rate']:.2f} steps/s (median {slowest['median']:.2f})"
        found.append(f"slowest: rank {slowest['rank']}, {rates}")
    if status["last_failure"]:
        found.append(f"last failure: {_failure(status['last_failure'])}")
    if status["log_folder"] and status["has_log_files"]:
        found.append(f"logs in {printable(str(status['log_folder']), 1000)}; see elasticctl logs")
    return found


def _failure(failure: Mapping[str, Any]) -> str:
    what = ": ".join(str(part) for part in (failure["what"], failure["exception"]) if part)
    who = f"rank {failure['rank']} (pid {failure['pid']}) in attempt {attempt_text(failure['attempt'])}"
    return f"{who}: {printable(what, 300)}"


def _odd_ranks(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines about the ranks that do not run, or are some steps behind the other ranks."""
    by_what: dict[str, list[int]] = {}
    most: dict[bool, int] = {}
    for told in map(_progress, workers):
        if told.get("step") is not None:
            counts = _counts_attempt(told)
            most[counts] = max(most.get(counts, 0), told["step"])
    for worker in workers:
        rank, state, told = worker["rank"], worker["state"], _progress(worker)
        step, what = told.get("step"), ""
        if state == "EXITED":
            what = f"exited with code {worker['exitcode']}"
        elif state == "PAUSED":
            what = f"stopped by a signal; kill -CONT {worker['pid']} continues it"
        elif step is not None and step < most[_counts_attempt(told)] - 1:
            what = f"{most[_counts_attempt(told)] - step:,} steps behind the others"
        if what and rank is not None:
            by_what.setdefault(what, []).append(rank)
    lines = [f"{ranks_text(sorted(ranks), 8)}: {what}" for what, ranks in by_what.items()]
    return lines[:MAX_SHOWN]


_LETTERS = {"RUNNING": ".", "PAUSED": "p", "EXITED": "x"}
_ROW = 64


def letters(status: Mapping[str, Any]) -> list[str]:
    """Return rows with a letter for each rank's state. Empty if the table of ranks shows all ranks."""
    workers = status["workers"]
    if len(workers) <= MAX_SHOWN:
        return []
    shown = "".join(_LETTERS.get(worker["state"], "?") for worker in workers)
    rows = [f"{at:>5}  {shown[at : at + _ROW]}" for at in range(0, len(shown), _ROW)]
    return ["", *rows, "       . running  p stopped by a signal  x exited"]


def ranks_table(status: Mapping[str, Any]) -> list[str]:
    """Return a table of this node's ranks; if they are too many, of those with the fewest steps."""
    workers = list(status["workers"])
    if not workers:
        return []
    rows = [("RANK", "PID", "STATE", "STEP", "LAST STEP")]
    if len(workers) > MAX_SHOWN:
        workers.sort(key=lambda worker: _progress(worker).get("step") or 0)
    for worker in workers[:MAX_SHOWN]:
        told = _progress(worker)
        age = told.get("age_seconds")
        rows.append((
            UNKNOWN if worker["rank"] is None else str(worker["rank"]),
            str(worker["pid"]),
            str(worker["state"]).lower(),
            _step_text(told, status),
            UNKNOWN if age is None else duration(age),
        ))  # fmt: skip
    lines = table(rows)
    if len(workers) > MAX_SHOWN:
        more = len(workers) - MAX_SHOWN
        lines.append(f"and {more} more rank{'s' if more != 1 else ''} on this node")
    return lines
