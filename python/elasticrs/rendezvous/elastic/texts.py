"""Lines for the user."""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

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


def end_of(head: Head) -> str:
    """How a round ended: of ENDED the head's own, of RUNNING the one before."""
    end = head.end or {}
    where = f"on node {end['node']}" if end.get("node") else "on an unknown node"
    kind = end.get("kind")
    if kind == "failure":
        cause = head.cause or {}
        where = f"on node {cause['node']}" if cause.get("node") else where
        rank = f" (rank {cause['rank']})" if cause.get("rank") is not None else ""
        why = f": {cause['message']}" if cause.get("message") else ""
        return f"a worker failed {where}{rank}{why}"
    if kind == "setup":
        return f"the workers {where} could not be started: {end.get('message')}"
    if kind == "lost":
        return f"node {end.get('node')} was lost"
    if kind == "left":
        why = f" ({end['message']})" if end.get("message") else ""
        return f"node {end.get('node')} left{why}"
    return "more nodes are here"


def round_line(head: Head, max_restarts: int) -> str:
    """What to tell when a round follows another."""
    charged = bool((head.end or {}).get("charged"))
    cost = (
        f"restart {head.used} of {max_restarts}"
        if charged
        else f"not charged, {head.used} of {max_restarts} used"
    )
    return f"{end_of(head)}; round {head.round} starts with {nodes(head.size)} ({cost})"


def closed_line(run_id: str, head: Head) -> str:
    """What to tell who comes to a closed job."""
    when = f" at {utc(head.time_ns)}" if head.time_ns else ""
    why = f": {head.reason}" if head.reason else ""
    return f"job {run_id} is closed: {head.outcome}{when} in round {head.round}{why}"
