"""Lines for the user."""

from __future__ import annotations

import time

from elasticrs.rendezvous.elastic.records import blame_of
from elasticrs.report.phrases import SILENT, how_it_ended

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from elasticrs.rendezvous.elastic.records import Head

MAX_NAMED = 8


def named(names: Sequence[str]) -> str:
    """A list of names that stays readable with thousands of them."""
    shown = ", ".join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"


def nodes(count: int) -> str:
    """A number of nodes."""
    return "1 node" if count == 1 else f"{count} nodes"


def utc(time_ns: int) -> str:
    """A wall time for the user."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_ns // 1_000_000_000))


def end_of(head: Head, *, names_pid: bool = True) -> str:
    """Return text that says how the last finished round ended. This is the head's round, or the previous
    round if the head's round is still running.
    """
    end = head.end or {}
    kind = end.get("kind")
    if kind == "failure":
        return failure_of(head.cause, end.get("node"), names_pid=names_pid)
    if kind == "setup":
        return f"the workers on node {end.get('node')} could not be started: {end.get('message')}"
    if kind == "lost":
        return f"node {end.get('node')} was lost"
    if kind == "left":
        why = f" ({end['message']})" if end.get("message") else ""
        return f"node {end.get('node')} left{why}"
    if kind == "asked":
        return f"node {end.get('node')} asked for another round ({end.get('message')})"
    return "more nodes have joined"


def failure_of(cause: Mapping[str, Any] | None, node: object = None, *, names_pid: bool = True) -> str:
    """Return text that says which worker failed, on which node, and how.

    ``node`` is used if the cause names no node.
    """
    told = cause or {}
    where = f"on node {told.get('node') or node or '?'}"
    if told.get("rank") is None:
        return f"a worker failed {where}"
    pid = f" (pid {told['pid']})" if told.get("pid") and names_pid else ""
    return f"rank {told['rank']}{pid} {where}{how_it_failed(told)}"


def how_it_failed(cause: Mapping[str, Any]) -> str:
    """Return text to append to a worker's name: ``: KeyError: 1 (train.py:4)``, `` died by SIGKILL``."""
    lines = str(cause.get("message") or "").strip().splitlines()
    if blame_of(cause) is not None:
        # The agent killed this hung worker, so the exit code says nothing about the reason.
        return f": {lines[-1].strip() if lines else 'hung'}"
    if cause.get("message") == SILENT:
        return f" {SILENT}"
    exitcode = cause.get("exitcode")
    if len(lines) > 1 and (exitcode is None or (isinstance(exitcode, int) and exitcode >= 0)):
        # The worker raised an exception and was not killed, so use the headline of its traceback.
        from elasticrs.report.traceback_summary import headline

        return f": {headline(str(cause['message']))}"
    return f" {how_it_ended(exitcode) if 'exitcode' in cause else 'failed'}"


def round_line(head: Head, max_restarts: int, told: str | None = None) -> str:
    """Say that a round follows another. What the user was told of the end of the one before is not said
    again.
    """
    cost = f"no restart charged, {head.used} of {max_restarts} used"
    if (head.end or {}).get("charged"):
        cost = f"restart {head.used} of {max_restarts}"
    starts = f"round {head.round} starts with {nodes(head.size)} ({cost})"
    why = end_of(head)
    return starts if why == told else f"{why}; {starts}"


def closed_line(run_id: str, head: Head) -> str:
    """What to tell who comes to a closed job."""
    when = f" at {utc(head.time_ns)}" if head.time_ns else ""
    why = f": {head.reason}" if head.reason else ""
    how = f"{head.outcome}{when} in round {head.round}{why}"
    return f"job {run_id} is closed: {how}; use a different id for another job, or fresh=1"
