"""Format messages to the user about nodes, rounds and failures."""

from __future__ import annotations

from elasticrs._engine.job.failure_cause import MessageKind
from elasticrs._engine.job.phrases import how_it_ended, local_time, restarts_used
from elasticrs._engine.nodes.protocol.records import blame_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from elasticrs._engine.job.restart_policy import RestartSettings
    from elasticrs._engine.nodes.protocol.records import Head

MAX_NAMED = 8

INDEPENDENT = "give a job of its own another --rdzv-endpoint and --rdzv-id (or --standalone)"
"""Advice for the user if this agent has reached the rendezvous of another job."""

TWIN = f"beside another launch on this machine; if this is a run of its own, stop it and {INDEPENDENT}"
"""End of messages to the user if another launch on this machine takes part in the same job."""


def named(names: Sequence[str]) -> str:
    """List the first :data:`MAX_NAMED` names, and add the number of further names."""
    shown = ", ".join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"


def nodes(count: int) -> str:
    """Format a number of nodes, such as ``1 node`` or ``3 nodes``."""
    return "1 node" if count == 1 else f"{count} nodes"


def end_of(head: Head, *, names_pid: bool = True) -> str:
    """Describe how the last finished round ended. This is the round in ``head``, or the one before it if the
    round in ``head`` is still running.
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
    """Describe a failure: which worker failed, on which node, and how.

    If the cause does not name the node, use ``node``.
    """
    told = cause or {}
    where = f"on node {told.get('node') or node or '?'}"
    if told.get("rank") is None and told.get("permanent_sign"):
        return f"the workers {where} could not be started: {told['permanent_sign']}"
    if told.get("rank") is None:
        return f"a worker failed {where}"
    pid = f" (pid {told['pid']})" if told.get("pid") and names_pid else ""
    return f"rank {told['rank']}{pid} {where}{how_it_failed(told)}"


def how_it_failed(cause: Mapping[str, Any]) -> str:
    """Return a description of a worker's failure, such as ``: KeyError: 1 (train.py:4)`` or `` died by
    SIGKILL``, to append to the worker's name.
    """
    kind, message = cause.get("message_kind"), str(cause.get("message") or "")
    if kind == MessageKind.REPORT:
        from elasticrs._engine.job.traceback_summary import headline

        return f": {headline(message)}"
    if kind in (MessageKind.REASON, MessageKind.PHRASE):
        colon = ":" if kind == MessageKind.REASON else ""
        return f"{colon} {message.strip().splitlines()[-1].strip()}" if message.strip() else " failed"
    return f" {how_it_ended(cause['exitcode']) if 'exitcode' in cause else 'failed'}"


def restart_cost(policy: RestartSettings, used: int, *, is_charged: bool) -> str:
    """Return text that says whether a round was charged to the restart budget, and how many restarts are used
    up.
    """
    if is_charged:
        return f"restart {restarts_used(used, policy.max_restarts, policy.window)}"
    if policy.window is not None:
        return "no restart charged"
    return f"no restart charged, {used} of {policy.max_restarts} used"


def round_line(head: Head, policy: RestartSettings, told: str | None = None) -> str:
    """Return a line that announces a new round and says why the previous round ended. Omit the reason if it
    equals ``told``, because the user has already seen it.
    """
    cost = restart_cost(policy, head.used, is_charged=bool((head.end or {}).get("charged")))
    starts = f"round {head.round} starts with {nodes(head.size)} ({cost})"
    why = end_of(head)
    return starts if why == told else f"{why}; {starts}"


def diagnosis_line(head: Head) -> str | None:
    """Return a line that explains why the previous round hung or failed, based on evidence from all nodes;
    ``None`` without a diagnosis.
    """
    diagnosis = (head.cause or {}).get("diagnosis")
    how = "failed" if blame_of(head.cause) is None else "hung"
    return None if diagnosis is None else f"round {head.round - 1} {how}: {diagnosis}"


def closed_line(run_id: str, head: Head) -> str:
    """Return the error message for a node that tries to join a closed job."""
    when = f" at {local_time(head.time_ns)}" if head.time_ns else ""
    why = f": {head.reason}" if head.reason else ""
    how = f"{head.outcome}{when} in round {head.round}{why}"
    return f"job {run_id} is closed: {how}; use a different id for another job, or fresh=1"
