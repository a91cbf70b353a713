"""Turns the status of a job into texts for users: the lines of ``elasticctl``, and the texts on the health
check server's page. Does no input or output itself.
"""

from __future__ import annotations

import os
from string import hexdigits
from typing import TYPE_CHECKING

from elasticrs._engine.job.phrases import (
    attempt_text,
    counted,
    distinct_names,
    duration,
    how_it_ended,
    local_time,
    printable,
    ranks_text,
)

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
_LATE = 0.5
"""Seconds without an answer of the agent's loop after which the loop counts as stuck."""

MAX_SHOWN = 16
"""Maximum number of remarks about ranks, and of rows in the table of ranks."""

UNKNOWN = "-"


def state_of(status: Mapping[str, Any]) -> str:
    if status.get("spare_of") and not status.get("outcome"):
        return "waiting as a spare"
    if status.get("is_ending") and not status.get("outcome"):
        return "being stopped"
    state = str(status.get("outcome") or status.get("state"))
    return _STATES.get(state, state)


def _has_ended(status: Mapping[str, Any]) -> bool:
    return status["state"] in ("SUCCEEDED", "FAILED")


def _short_id(job: Mapping[str, Any]) -> str:
    """Return a job's run id, or only the first 8 characters of a UUID. ``elasticctl --job`` takes both."""
    run_id = str(job["run_id"])
    parts = run_id.split("-")
    is_uuid = list(map(len, parts)) == [8, 4, 4, 4, 12] and set("".join(parts).lower()) <= set(hexdigits)
    return parts[0] if is_uuid else printable(run_id, 40)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of text with the cells of ``rows`` in aligned columns. The first row has the titles."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


TITLES = ("JOB", "SCRIPT", "STATE", "NODES", "RANKS", "STEP", "LAST STEP", "RUNNING", "RESTARTS", "PID")


def row(pid: int, status: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return a job's row in the table of all jobs. ``status`` is ``None`` if the agent does not answer."""
    if status is None:
        return (*(UNKNOWN,) * 2, "does not answer", *(UNKNOWN,) * 6, str(pid))
    job, group = status["job"], status["group"] or {}
    last, age = last_step(status)
    return (
        _short_id(job),
        printable(os.path.basename(str(job["name"])), 40),
        state_of(status),
        _nodes_text(group),
        str(group.get("workers", UNKNOWN)),
        _step_text(last, status),
        UNKNOWN if age is None else duration(age),
        duration(status["agent"]["uptime_seconds"]),
        f"{status['restarts']} of {job['max_restarts']}",
        str(pid),
    )


def _nodes_text(group: Mapping[str, Any]) -> str:
    nodes, rank = group.get("world_size", UNKNOWN), group.get("rank")
    return str(nodes) if nodes == 1 or rank is None else f"{nodes} (here: group rank {rank})"


def all_workers(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the workers in a job's status, sorted by rank, each with the name of its node (``node``) and the
    age of its data (``told_seconds``). Workers of other nodes are included if their agents have answered.
    """
    others, own = status.get("others") or (), (status["group"] or {}).get("rank", -1)
    names = distinct_names({own: status["host"], **{each["group_rank"]: each["node"] for each in others}})
    found = [{**worker, "node": names[own], "told_seconds": 0.0} for worker in status["workers"]]
    for told in others:
        for worker in told["workers"]:
            progress = worker.get("progress")
            if progress and progress.get("age_seconds") is not None:
                progress = {**progress, "age_seconds": progress["age_seconds"] + told["age_seconds"]}
            found.append(
                {
                    **worker,
                    "progress": progress,
                    "node": names[told["group_rank"]],
                    "told_seconds": told["age_seconds"],
                }
            )
    return sorted(found, key=lambda worker: (worker["rank"] is None, worker["rank"] or 0))


def _shows_nodes(status: Mapping[str, Any]) -> bool:
    return bool(status.get("others"))


def _progress(worker: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a worker about its last step or, if it has made none, its last heartbeat."""
    return worker.get("progress") or worker.get("heartbeat") or {}


def _counts_attempt(progress: Mapping[str, Any]) -> bool:
    """Return true if the worker's steps are counted from 0 again after each restart."""
    return progress.get("counts") == "attempt"


def last_step(status: Mapping[str, Any]) -> tuple[Mapping[str, Any], float | None]:
    """Return the fields about the last step of the rank that has made the most steps, and the seconds since
    the last progress of any rank. Ranks whose steps are counted on after restarts take precedence.
    """
    told = [_progress(worker) for worker in all_workers(status)]
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
    return f"{title(status)}: {_how(status)}"


def title(status: Mapping[str, Any]) -> str:
    job = status["job"]
    return f"{printable(os.path.basename(str(job['name'])))} (job {_short_id(job)})"


def _how(status: Mapping[str, Any]) -> str:
    group = status["group"] or {}
    parts = [state_of(status)]
    if status.get("spare_of"):
        parts[0] += f" (the job runs on {counted(status['spare_of'], 'node')})"
    elif group:
        nodes, ranks = group["world_size"], group["workers"]
        parts[0] += f" with {counted(ranks, 'rank')}"
        parts[0] += f" on {nodes} nodes" if nodes != 1 else ""
    has_ended = _has_ended(status)
    parts[0] += f" {'after' if has_ended else 'for'} {duration(status['agent']['uptime_seconds'])}"
    last, age = last_step(status)
    if last:
        since = "" if age is None else f" ({duration(age)} ago)"
        parts.append(f"{'last step' if has_ended else 'step'} {_step_text(last, status)}{since}")
    elif age is not None:
        parts.append("before its first step")
    parts.append(f"{status['restarts']} of {status['job']['max_restarts']} restarts used")
    return ", ".join(parts)


def remarks(status: Mapping[str, Any]) -> list[str]:
    """Return lines about what a user should look at, most important first, with commands that tell more."""
    return [text for _, text in _weighed_remarks(status)]


def why_stuck(status: Mapping[str, Any]) -> str | None:
    """Return why the agent's loop counts as stuck; ``None`` if the loop answers or still has time to."""
    agent = status["agent"]
    if agent["reason"] and (not agent["alive"] or agent["age_seconds"] >= _LATE):
        return str(agent["reason"])
    return None


def _weighed_remarks(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs: how serious a remark is (``bad``, ``warn`` or ``note``), and its text for the user."""
    found = []
    agent, has_ended = status["agent"], _has_ended(status)
    job = f"--job {agent['pid']}"
    if not agent["alive"]:
        found.append(("bad", f"the agent does not work: {agent['reason']} (its pid is {agent['pid']})"))
    elif stuck := why_stuck(status):
        missing = f"what only it knows is missing here (its pid is {agent['pid']})"
        found.append(("bad", f"{stuck}; {missing}"))
    if status.get("waits_for") and not has_ended:
        found.append(("warn", f"waits for {printable(str(status['waits_for']), 1000)}"))
    if status["no_progress"] and not has_ended:
        what = printable(str(status["no_progress"]["what"]), 1000)
        found.append(("bad", f"{what}; see elasticctl stacks {job}"))
    cause = _cause(status)
    if cause is not None:
        found.append(("bad", f"cause: {cause}"))
    found += _odd_ranks(status)
    workers = [worker for worker in all_workers(status) if worker["rank"] is not None]
    unrecorded = [worker["rank"] for worker in workers if worker.get("has_recorder") is False]
    if unrecorded and not has_ended:
        why = "torch's flight recorder is off (TORCH_FR_BUFFER_SIZE) or missing"
        found.append(("note", f"{ranks_text(unrecorded, 8)}: cannot be seen if slow: {why}"))
    slowest = status["slowest"]
    if slowest and not has_ended:
        rates = f"{slowest['rate']:.2f} steps/s (median {slowest['median']:.2f})"
        found.append(("warn", f"slowest: rank {slowest['rank']}, {rates}"))
    if status["last_failure"] and cause is None:
        found.append(("note", f"last failure: {_failure(status['last_failure'])}"))
    if status["log_folder"] and status["has_log_files"]:
        folder = printable(str(status["log_folder"]), 1000)
        found.append(("note", f"logs in {folder}" + ("" if has_ended else f"; see elasticctl logs {job}")))
    return found


def _cause(status: Mapping[str, Any]) -> str | None:
    """Return why the current attempt has failed or, at the end, the job; ``None`` if neither has failed."""
    cause, last = status.get("cause"), status["last_failure"]
    if status["state"] == "FAILED" and cause and cause["node"] != status["host"]:
        return printable(str(cause["what"]), 1000)
    has_failed = status["state"] in ("UNHEALTHY", "FAILED")
    return _failure(last) if has_failed and last and last["attempt"] == status["attempt"] else None


def _failure(failure: Mapping[str, Any]) -> str:
    what = ": ".join(str(part) for part in (failure["what"], failure["exception"]) if part)
    who = f"rank {failure['rank']} (pid {failure['pid']}) in attempt {attempt_text(failure['attempt'])}"
    return f"{who}: {printable(what, 300)}"


LETTERS = {
    ".": "running",
    "n": "no progress",
    "b": "steps behind",
    "l": "late in collectives",
    "p": "stopped by a signal",
    "x": "exited",
    "s": "stopped by elasticrs",
    "F": "failed",
}
"""The letters that stand for the states of ranks where there is no room for words."""
_MOST_URGENT = "Fpxbsln."
_WEIGHTS = {"b": "warn", "l": "warn", "p": "warn", "x": "note", "s": "note", "F": "bad"}


def _looks(status: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return for each rank the letter of its state (see :data:`LETTERS`), and a text for the user about it.
    The text is empty for a rank that runs and is not more than one step behind the others.
    """
    most = _most_steps(workers)
    found, normal = [], "n" if status["no_progress"] and not _has_ended(status) else "."
    for worker in workers:
        state, told, look = worker["state"], _progress(worker), (normal, "")
        step = told.get("step")
        if state == "EXITED" and worker.get("was_stopped"):
            look = "s", LETTERS["s"]
        elif state == "EXITED":
            code = worker["exitcode"]
            look = "F" if code else "x", LETTERS["x"] if code is None else how_it_ended(code)
        elif state == "PAUSED":
            where = f" on {printable(str(worker['node']))}" if _shows_nodes(status) else ""
            look = "p", f"stopped by a signal; kill -CONT {worker['pid']}{where} continues it"
        elif step is not None and step < (others := most[_counts_attempt(told), worker["told_seconds"]]) - 1:
            look = "b", f"{others - step:,} steps behind the others"
        elif worker.get("late") and normal == ".":
            look = "l", _lateness(worker, status)
        found.append(look)
    return found


def _lateness(worker: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    late = worker["late"]
    where = f" on {printable(str(worker['node']))}" if _shows_nodes(status) else ""
    what = f"{late['times']:,} of {late['of']:,} {printable(str(late['operation']), 40)}"
    see = f"see elasticctl stacks --job {status['agent']['pid']}"
    doubt = "; it may itself wait for another rank" if late["may_wait"] else ""
    return f"{late['lag_ms']:.0f} ms (median) behind the others{where} in {what}{doubt}; {see}"


def _most_steps(workers: Sequence[Mapping[str, Any]]) -> dict[tuple[bool, float], int]:
    """Return the largest number of steps that any rank had made when a node gave its answer. For each answer,
    newer ones are left out, because they include later steps. Each key is a pair: whether steps are counted
    from 0 after each restart, and the age of the answer in seconds.
    """
    told: dict[tuple[bool, float], int] = {}
    for worker in workers:
        progress = _progress(worker)
        if progress.get("step") is not None:
            key = _counts_attempt(progress), worker["told_seconds"]
            told[key] = max(told.get(key, 0), progress["step"])
    return {
        (counts, age): max(step for (like, older), step in told.items() if like == counts and older >= age)
        for counts, age in told
    }


def _odd_ranks(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs for ranks that do not run or are steps behind: how serious that is, and a text. At the end
    of the job, leave out the ranks that have exited with code 0.
    """
    workers = all_workers(status)
    by_look: dict[tuple[str, str], list[int]] = {}
    for worker, look in zip(workers, _looks(status, workers), strict=True):
        is_odd = look[1] and not (look[0] == "x" and _has_ended(status))
        if is_odd and worker["rank"] is not None:
            by_look.setdefault(look, []).append(worker["rank"])
    found = [
        (_WEIGHTS[letter], f"{ranks_text(sorted(ranks), 8)}: {what}")
        for (letter, what), ranks in sorted(by_look.items(), key=lambda each: _MOST_URGENT.index(each[0][0]))
    ]
    return found[:MAX_SHOWN]


_ROW = 64


def letters(status: Mapping[str, Any]) -> list[str]:
    """Return lines with a letter for each rank's state, or none if the table of ranks shows all ranks."""
    workers = all_workers(status)
    if len(workers) <= MAX_SHOWN:
        return []
    shown = "".join(letter for letter, _ in _looks(status, workers))
    rows = [f"{at:>5}  {shown[at : at + _ROW]}" for at in range(0, len(shown), _ROW)]
    return ["", *rows, "       " + "  ".join(f"{letter} {state}" for letter, state in LETTERS.items())]


def ranks_table(status: Mapping[str, Any]) -> list[str]:
    """Return a table of ranks. If it has no room for all, it shows those that most need attention."""
    rows = [cells for _, cells in _rank_rows(status)]
    return [*table([_rank_titles(status), *rows]), *_more(status)] if rows else []


def _rank_titles(status: Mapping[str, Any]) -> tuple[str, ...]:
    titles = ("PID", "STATE", "STEP", "LAST STEP")
    return ("RANK", "NODE", *titles, "AS OF") if _shows_nodes(status) else ("RANK", *titles)


def _rank_rows(status: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the rows of the table of ranks, as pairs: the letter of the rank's state, and the cells."""
    workers = all_workers(status)
    found = list(zip(workers, (letter for letter, _ in _looks(status, workers)), strict=True))
    if len(workers) > MAX_SHOWN:
        found.sort(key=lambda each: (_MOST_URGENT.index(each[1]), _progress(each[0]).get("step") or 0))
    rows: list[tuple[str, tuple[str, ...]]] = []
    for worker, letter in found[:MAX_SHOWN]:
        told = _progress(worker)
        age, shows_nodes = told.get("age_seconds"), _shows_nodes(status)
        told_seconds = worker["told_seconds"]
        cells = (
            UNKNOWN if worker["rank"] is None else str(worker["rank"]),
            *((printable(str(worker["node"]), 40),) if shows_nodes else ()),
            str(worker["pid"]),
            "stopped" if letter == "s" else str(worker["state"]).lower(),
            _step_text(told, status),
            UNKNOWN if age is None else duration(age),
            *((f"{duration(told_seconds)} ago" if told_seconds else "now",) if shows_nodes else ()),
        )
        rows.append((letter, cells))
    return rows


def _more(status: Mapping[str, Any]) -> list[str]:
    more = len(all_workers(status)) - MAX_SHOWN
    return [*([f"and {counted(more, 'more rank')}"] if more > 0 else []), *_missing(status)]


def _missing(status: Mapping[str, Any]) -> list[str]:
    group = status["group"] or {}
    missing = group.get("workers", 0) - len(all_workers(status))
    if missing <= 0:
        return []
    if why_stuck(status):
        return [f"and {counted(missing, 'rank')} on other nodes, which only the agent's loop can ask"]
    return [f"and {counted(missing, 'rank')} of which other nodes have not told yet"]


_STATE_WEIGHTS = {
    "HEALTHY": "ok",
    "SUCCEEDED": "ok",
    "NO_PROGRESS": "bad",
    "UNHEALTHY": "bad",
    "FAILED": "bad",
}


def page(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the texts on the health check server's page. ``elasticctl status --watch`` prints the same ones,
    put together into lines. In a job with many ranks, ``rows`` has only the ranks with a problem, and
    ``grid`` has for each node its name, its ranks, and the letter of each rank's state.
    """
    if "job" not in status:
        return {"title": "elasticrs", "sentence": "this process has told nothing about a job yet"}
    pid, workers, host = status["agent"]["pid"], all_workers(status), printable(str(status["host"]))
    facts = zip(TITLES, row(pid, status), strict=True)
    failures = [*status["earlier_failures"], status["last_failure"]]
    rows, shows_all = _rank_rows(status), len(workers) <= MAX_SHOWN
    return {
        "title": title(status),
        "host": host,
        "state": state_of(status),
        "weight": _STATE_WEIGHTS.get(status["state"], "warn"),
        "sentence": _how(status),
        "remarks": _weighed_remarks(status),
        "facts": [fact for fact in facts if fact[0] not in ("JOB", "SCRIPT", "STATE", "PID")],
        "titles": _rank_titles(status),
        "rows": rows if shows_all else [each for each in rows if each[0] not in "n."],
        "more": _missing(status),
        "grid": [] if shows_all else _grid(status, workers),
        "letters": LETTERS,
        "failures": [
            (local_time(failure["time_ms"] * 1_000_000), _failure(failure)) for failure in failures if failure
        ],
        "commands": [] if _has_ended(status) else _commands(status),
    }


def _grid(
    status: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]
) -> list[tuple[str, list[int | None], str]]:
    """Return for each node its name, its ranks, and a text with one letter for the state of each rank."""
    rows: dict[str, tuple[list[int | None], list[str]]] = {}
    for worker, (letter, _) in zip(workers, _looks(status, workers), strict=True):
        ranks, letters = rows.setdefault(printable(str(worker["node"])), ([], []))
        ranks.append(worker["rank"])
        letters.append(letter)
    return [(node, ranks, "".join(letters)) for node, (ranks, letters) in rows.items()]


def _commands(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the commands with which a user can act on the job, and what they do."""
    job = f"--job {status['agent']['pid']}"
    has_nodes = (status["group"] or {}).get("world_size", 1) > 1
    found = [
        ("stacks", "where each rank is, and who waits for whom"),
        ("logs -f", "what the ranks print"),
        ("checkpoint", "ask the ranks to save (SIGUSR1 after the same step); they go on"),
        ("restart", "restart all workers; this costs no restart"),
        *([("drain NODE", "a node leaves, and the others go on")] if has_nodes else []),
        ("stop", "ask the ranks to save and end (SIGTERM); SIGKILL after --shutdown-timeout"),
    ]
    return [(f"elasticctl {command} {job}", what) for command, what in found]
