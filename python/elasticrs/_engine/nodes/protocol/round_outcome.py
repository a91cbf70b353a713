"""Evaluate the end of a round, and format messages to the user about nodes, rounds and failures. All
functions are pure. :mod:`.restart_policy` decides how to react to a failure.

- **VERDICT-1** A restart is charged to the budget only if workers have failed and no member was lost. A loss
  explains failures: workers often fail *because* a node died, and may report that before its loss is known.
- **VERDICT-2** The first cause is the earliest that members report for the round. An exception that only
  reports a lost or silent peer counts only if there is no other cause. If workers hung, the first cause is
  the hang of the worker that the others waited for (:func:`~.records.blame_of`).
"""

from __future__ import annotations

import signal
import zlib
from collections import Counter

from elasticrs._engine.job.phrases import MAX_HOW, how_it_ended, local_time, printable, restarts_used
from elasticrs._engine.job.restart_policy import STEADY, Cause, Evidence, Verdict, decide, exclude
from elasticrs._engine.job.value import Value
from elasticrs._engine.nodes.protocol.records import blame_of, cut, is_of_same_node, time_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from elasticrs._engine.job.restart_policy import RestartSettings
    from elasticrs._engine.nodes.protocol.leader_view import View
    from elasticrs._engine.nodes.protocol.records import Head, Node
    from elasticrs._engine.nodes.transport.settings import Settings

MAX_DIAGNOSIS = 1024
"""Maximum length of a diagnosis, in bytes."""

MAX_DIAGNOSED = 1 << 17
"""Maximum number of ranks in a diagnosis. Any further ranks are ignored."""

MAX_SETUPS = 3
"""Maximum number of consecutive rounds whose workers fail to start."""


class RoundVerdict(Value):
    """Verdict on a finished round. If it has a ``reason``, the job ends for that reason. The leader may write
    it to the store only while all members in ``alive`` are registered, because the loss of one of them would
    explain the failure.
    """

    alive: list[str]
    head: Head
    reason: str | None


def is_explained(view: View) -> bool:
    """Return true if a lost or leaving member explains the failure of others. A finished member explains it
    only if it hosted the workers' store (group rank 0).
    """
    is_leaving = any(member in view.rank_of for member in view.farewells)
    return bool(view.missing) or 0 in view.absent or is_leaving


def is_charged(view: View, head: Head) -> bool:
    return kind_of(head) == "failure" and not is_explained(view)


def witnesses(view: View) -> list[str]:
    """Return the members that may have workers and whose loss would explain the round's failure."""
    return sorted(member for member in view.slow if view.rank_of[member] not in view.done - {0})


def kind_of(head: Head) -> str:
    kind: str = (head.end or {}).get("kind", "")
    return kind


def known_causes(view: View, head: Head) -> list[dict[str, Any]]:
    """Return the cause of failure that each agent last reported, including what workers' error files say."""
    found = [node.cause for node in _reports(view, head) if node.cause is not None]
    first = head.cause
    if first is not None and not any(is_of_same_node(cause, first) for cause in found):
        found.insert(0, first)
    return found[::-1]


def first_cause(view: View, head: Head) -> dict[str, Any] | None:
    """Return the cause of the round's first failure (VERDICT-2); ``None`` if no cause is known."""
    known = known_causes(view, head)
    if not known:
        return None
    known = [cause for cause in known if not cause.get("is_consequence")] or known
    # Break timestamp ties by rank, so that the result does not depend on the order of the reports.
    first = min(
        known, key=lambda cause: (time_of(cause) is None, time_of(cause) or 0, cause.get("rank") or 0)
    )
    if blame_of(first) is None:
        return first
    hung = [(blame, cause) for cause in known if (blame := blame_of(cause)) is not None]
    return min(hung, key=lambda each: each[0])[1]


def diagnosed(
    view: View, head: Head, cause: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, str | None]:
    """Return the cause of a round's failure and, if flight records (torch's logs of collectives) explain a
    hang or a failed collective, a diagnosis. If they blame another rank than the heartbeats do, return the
    cause of the rank that they blame, because heartbeats are weak evidence with one rank per node. If the
    flight records are not conclusive, the cause names the ranks that may be to blame.
    """
    if cause is None or not view.has_evidence:
        return cause, None
    is_hang = blame_of(cause) is not None
    # Only SIGABRT can mean a failed collective here: NCCL's watchdog then aborts the process.
    if not is_hang and not cause.get("is_consequence") and cause.get("exitcode") != -signal.SIGABRT:
        return cause, None
    from elasticrs._engine.hangs.culprits import decide, decide_failure
    from elasticrs._engine.hangs.diagnose import diagnose_nodes

    nodes = [(seat.name, view.evidence_of(rank)) for rank, seat in enumerate(view.seats)]
    world_size = min(head.world_size, MAX_DIAGNOSED)
    diagnosis = diagnose_nodes(nodes, world_size, view.done)
    rank = cause.get("rank")
    if diagnosis is None or rank is None:
        return cause, None if diagnosis is None else cut(diagnosis.summary, MAX_DIAGNOSIS)
    blame = decide_failure(diagnosis, rank, range(world_size))
    if is_hang:
        blame = decide(diagnosis, rank, cause["ground"])
    if blame is not None and blame.is_decided and rank not in blame.ranks:
        cause = _cause_of(view, head, cause, blame.ranks[0])
        rank = cause.get("rank")
    if blame is not None and (len(blame.ranks) > 1 or not blame.is_decided or rank not in blame.ranks):
        cause = {**cause, "blamed": blame.text}
    return cause, cut(diagnosis.summary, MAX_DIAGNOSIS)


def _cause_of(view: View, head: Head, cause: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the cause to report if flight records blame ``rank``: the hang that a node has reported for it,
    or a new cause with its node and local rank. Return ``cause`` unchanged if these are unknown.
    """
    from elasticrs._engine.hangs.node_evidence import decode

    kept = ("round", "time_ns", "error_ns", "ground", "silence")
    shared = {name: cause[name] for name in kept if name in cause}
    is_hang = blame_of(cause) is not None
    known = [other for other in known_causes(view, head) if other.get("rank") == rank]
    hung = [(blame, other) for other in known if (blame := blame_of(other)) is not None]
    if hung:
        return min(hung, key=lambda each: each[0])[1]

    def told(group_rank: int, local_rank: int, message: str, how: str, **more: int) -> dict[str, Any]:
        name = view.seats[group_rank].name
        place = {"node": name, "host": name, "group_rank": group_rank, "rank": rank, "local_rank": local_rank}
        return {**shared, **place, "message": message, "how": how, **more}

    end, silent = 0, []
    for group_rank in range(len(view.seats)):
        ranks = [found.rank for found in decode(view.evidence_of(group_rank))]
        if not ranks:
            silent.append(group_rank)
            continue  # This node has sent no usable evidence.
        if rank < min(ranks):
            break
        end, silent = max(ranks) + 1, []
        if rank in ranks:
            what = "hung: kept the other ranks waiting" if is_hang else "made a collective of the others fail"
            message = f"{what}, as the flight records show"
            return told(group_rank, ranks.index(rank), message, f": {message}")
    if len(silent) == 1 and silent[0] in view.done:
        message = "exited with code 0 while others still waited for it"
        return told(silent[0], rank - end, message, f" {message}", exitcode=0)
    return cause


def _reports(view: View, head: Head) -> list[Node]:
    members = [view.nodes[member] for member in sorted(view.causes) if member in view.rank_of]
    return [node for node in members if node.idle == head.round]


def _bound_nodes(view: View) -> Iterator[tuple[str, str]]:
    """Yield the name of each node that must not be excluded from the job, and the reason."""
    for name, count in Counter(node.name for node in view.nodes.values()).items():
        if count > 1:
            yield name, f"{count} agents have this name"


def _member_of(view: View, name: str) -> str:
    """Return the only member on the node ``name``: a node with several agents would not be excluded."""
    return next(
        member for member in sorted(view.rank_of) if member in view.nodes and view.nodes[member].name == name
    )


def judge(
    view: View,
    head: Head,
    settings: Settings,
    policy: RestartSettings,
    was_short: bool | None,
    now_ns: int,
    *,
    min_nodes: int = 1,
) -> RoundVerdict:
    """Decide whether the job continues after a round. Called once all members of the round have stopped or
    are lost, or after ``settle`` seconds. ``was_short`` is true if the round was short, and ``None`` if this
    agent did not see its start.
    """
    kind, charged = kind_of(head), is_charged(view, head)
    first, diagnosis = diagnosed(view, head, first_cause(view, head))
    others = [cause for cause in known_causes(view, head) if cause is not first]
    evidence = Evidence(
        # If the round does not count as a restart, decide only whether to exclude a node.
        tuple(Cause.decoded(cause) for cause in (first, *others) if cause is not None and charged),
        nodes=head.size,
        now=now_ns / 1e9,
        ran=None if was_short is None else 0.0 if was_short else STEADY,
        # Derive the random part of the restart delay from the round's name, so that all leaders agree on it.
        jitter=zlib.crc32(f"{head.form}/{head.round}".encode()) / 0xFFFFFFFF,
        unfit=tuple((node.name, node.unfit) for node in _reports(view, head) if node.unfit is not None),
        bound=tuple(_bound_nodes(view)),
        available=len(view.candidates),
        min_nodes=min_nodes,
    )
    # Exclude unfit nodes even if no restart is charged: a lost node explains failed workers, but not a failed
    # node check.
    decision = (decide if charged else exclude)(policy, head.failures, evidence)
    more: dict[str, Any] = {"delay": round(decision.delay, 3), "note": decision.note}
    if decision.exclude is not None:
        more["excluded"] = _member_of(view, decision.exclude)
    lost = len(view.missing) - sum(view.rank_of.get(each) in view.missing for each in view.farewells)
    lossy = kind == "lost" or (kind == "failure" and not charged)
    short_losses = head.short_losses
    if was_short is False:
        short_losses = 0
    elif was_short and lossy:
        short_losses += 1
    counted = head.replaced(
        losses=head.losses + lost,
        short_losses=short_losses,
        setups=head.setups + 1 if kind == "setup" else 0,
        cause=first if first is None or diagnosis is None else {**first, "diagnosis": diagnosis},
        end={**(head.end or {}), "charged": charged, **{name: each for name, each in more.items() if each}},
    )
    reason = _why_not_again(view, counted, settings)
    if reason is None and decision.stop is Verdict.FAILED:
        reason = f"workers failed in round {head.round} and {decision.reason}"
    elif reason is None and decision.stop is not None:
        reason = decision.reason
        counted = counted.replaced(permanent=decision.stop is Verdict.PERMANENT)
    # Keep the history even if the job ends, because an implicated node uses it to report that it is unfit.
    counted = counted.with_failures(decision.history)
    return RoundVerdict(witnesses(view) if charged else [], counted, reason)


def _why_not_again(view: View, counted: Head, settings: Settings) -> str | None:
    """Return why the job ends regardless of the restart policy; ``None`` if it need not end."""
    end = counted.end or {}
    if kind_of(counted) == "setup" and (end.get("fatal") or counted.setups > MAX_SETUPS):
        return end_of(counted)
    if settings.max_node_losses is not None and counted.losses > settings.max_node_losses:
        lost_nodes = nodes(counted.losses)
        return f"lost {lost_nodes} (max_node_losses={settings.max_node_losses}), last: {_lost_names(view)}"
    if counted.short_losses >= settings.max_short_losses:
        return (
            f"{counted.short_losses} rounds in a row lost a node less than {settings.short_round:g} s"
            f" after their start, last: {_lost_names(view)}"
        )
    return None


def _lost_names(view: View) -> str:
    lost = [rank for rank in sorted(view.missing) if view.seats[rank].member not in view.farewells]
    return named(view.seat_names(lost)) or "unknown"


MAX_NAMED = 8

INDEPENDENT = "give a job of its own another --rdzv-endpoint and --rdzv-id (or --standalone)"
"""Advice for the user if this agent has reached the rendezvous of another job."""

TWIN = f"another launch on this machine takes part in this job; if it should not, {INDEPENDENT}"
"""Message to the user if another launch on this machine takes part in the same job."""


def named(names: Sequence[str], most: int = MAX_NAMED) -> str:
    """Format the first ``most`` names, and the number of further names, for a message."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def end_of(head: Head, *, names_pid: bool = True) -> str:
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
    """Describe which worker failed, where, and how. ``node`` is named if the cause names no node."""
    told = cause or {}
    where = f"on node {told.get('node') or node or '?'}"
    if told.get("rank") is None and told.get("permanent_sign"):
        return f"the workers {where} could not be started: {told['permanent_sign']}"
    if told.get("rank") is None:
        return f"a worker failed {where}"
    pid = f" (pid {told['pid']})" if told.get("pid") and names_pid else ""
    how = told.get("how") or f" {how_it_ended(told['exitcode']) if 'exitcode' in told else 'failed'}"
    return f"rank {told['rank']}{pid} {where}{printable(how, MAX_HOW)}"


def restart_cost(policy: RestartSettings, used: int, *, is_charged: bool) -> str:
    if is_charged:
        return f"restart {restarts_used(used, policy.max_restarts, policy.window)}"
    if policy.window is not None:
        return "no restart charged"
    return f"no restart charged, {used} of {policy.max_restarts} used"


def round_line(head: Head, policy: RestartSettings, told: str | None = None) -> str:
    """Announce a new round and why the last one ended, unless the user has seen the reason (``told``)."""
    cost = restart_cost(policy, head.used, is_charged=bool((head.end or {}).get("charged")))
    starts = f"round {head.round} starts with {nodes(head.size)} ({cost})"
    why = end_of(head)
    return starts if why == told else f"{why}; {starts}"


def diagnosis_line(head: Head) -> str | None:
    diagnosis = (head.cause or {}).get("diagnosis")
    how = "failed" if blame_of(head.cause) is None else "hung"
    return None if diagnosis is None else f"round {head.round - 1} {how}: {diagnosis}"


def closed_line(run_id: str, head: Head) -> str:
    when = f" at {local_time(head.time_ns)}" if head.time_ns else ""
    why = f": {head.reason}" if head.reason else ""
    how = f"{head.outcome}{when} in round {head.round}{why}"
    return f"job {run_id} is closed: {how}; use a different id for another job, or fresh=1"
