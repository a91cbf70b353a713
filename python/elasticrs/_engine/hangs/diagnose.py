"""Diagnoses why a job makes no progress, from the flight records and stacks of all ranks."""

from __future__ import annotations

from elasticrs._engine.hangs import flight_record
from elasticrs._engine.hangs.collectives import match
from elasticrs._engine.hangs.culprits import blame
from elasticrs._engine.hangs.flight_record import FlightRecordError
from elasticrs._engine.hangs.node_evidence import NodeEvidenceError, decode
from elasticrs._engine.hangs.paragraph import Writer
from elasticrs._engine.hangs.rank_record import RankFacts, reduced
from elasticrs._engine.hangs.stacks import main_thread, merge
from elasticrs._engine.hangs.values import Diagnosis, NoRecord, failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from elasticrs._engine.hangs.rank_record import RankRecord
    from elasticrs._engine.hangs.values import RankEvidence


def observe(found: RankEvidence) -> RankFacts:
    """Parse the flight records and stacks of one rank. Pure function.

    A record that cannot be parsed counts as missing and does not raise an exception.
    """
    frames = main_thread(found.stacks) if found.stacks else found.frames
    return RankFacts(found.rank, found.node, _parsed(found), frames)


def diagnose(evidence: Iterable[RankEvidence]) -> Diagnosis:
    """Name the ranks that keep a job from making progress. Pure function that never raises an exception.

    Args:
        evidence: evidence about each rank of the job, in any order.
    """
    return judge(map(observe, evidence))


def judge(facts: Iterable[RankFacts]) -> Diagnosis:
    """Name the ranks that keep a job from making progress, based on evidence that is already parsed. Pure
    function.

    Args:
        facts: parsed evidence about each rank of the job, in any order.
    """
    by_rank = {found.rank: found for found in sorted(facts, key=lambda found: found.rank)}
    matched = match({rank: found.record for rank, found in by_rank.items()})
    stacks = {rank: found.frames for rank, found in by_rank.items() if found.frames}
    merged = merge(stacks)
    culprits, candidates = blame(matched, stacks, tuple(by_rank))
    blamed = {culprit.collective for culprit in culprits}
    stuck = tuple(sorted(matched.stuck, key=lambda stuck: (stuck not in blamed, -len(stuck.waiting))))
    nodes = {rank: found.node for rank, found in by_rank.items() if found.node}
    writer = Writer(nodes, stacks, matched.no_record, culprits, stuck)
    no_record = {
        reason: tuple(rank for rank, why in matched.no_record.items() if why is reason) for reason in NoRecord
    }
    return Diagnosis(
        summary=writer.summary(),
        ranks=len(by_rank),
        culprits=culprits,
        candidates=candidates,
        collectives=stuck,
        no_record={reason: ranks for reason, ranks in no_record.items() if ranks},
        stacks=merged,
        evidence=writer.evidence(merged),
    )


def diagnose_nodes(
    nodes: Sequence[tuple[str, bytes | None]], world_size: int, finished: Collection[int] = ()
) -> Diagnosis | None:
    """Name the ranks that keep a job from making progress, based on the evidence from all nodes. Pure
    function.

    Evidence that cannot be decoded counts as missing and does not raise an exception.

    Args:
        nodes: each node's name and evidence, in the order of the nodes' group ranks. The evidence is the
            result of :func:`.node_evidence.encode`; ``None`` if the node did not answer.
        world_size: number of ranks in the job.
        finished: indexes of the nodes whose ranks have all exited with code 0. They send no evidence.

    Returns:
        The diagnosis; ``None`` if the evidence shows neither a stuck collective nor a rank to blame.
    """
    facts: dict[int, RankFacts] = {}
    silent: list[tuple[str, bool]] = []
    first = 0

    def lose(end: int) -> None:
        # The missing ranks belong to nodes that did not answer, because ranks are numbered in node order. If
        # there are several such nodes, leave the node's name empty.
        name = silent[0][0] if len(silent) == 1 else ""
        have_exited = bool(silent) and all(has_finished for _, has_finished in silent)
        reason = NoRecord.EXITED if have_exited else NoRecord.LOST
        facts.update({rank: RankFacts(rank, name, reason) for rank in range(first, end)})
        silent.clear()

    for index, (name, encoded) in enumerate(nodes):
        found = {each.rank: each for each in _decoded(encoded) if first <= each.rank < world_size}
        if not found:
            silent.append((name, index in finished))
            continue
        lose(min(found))
        facts.update(found)
        first = max(found) + 1
    lose(world_size)
    return telling(facts.values())


def telling(facts: Iterable[RankFacts]) -> Diagnosis | None:
    """Diagnose a hang or a failed collective from parsed flight records and stacks.

    Return ``None`` if no rank has a flight record, or if the result names neither a stuck collective nor a
    rank to blame.
    """
    facts = list(facts)
    if all(isinstance(found.record, NoRecord) for found in facts):
        return None
    try:
        diagnosis = judge(facts)
    # Catch every exception, because an error in this package must not hide the failure to be explained.
    except Exception as error:
        return failed(error, len(facts))
    return diagnosis if diagnosis.culprits or diagnosis.collectives else None


def _decoded(encoded: bytes | None) -> list[RankFacts]:
    try:
        return [] if encoded is None else decode(encoded)
    except NodeEvidenceError:
        return []  # Treat this node's invalid evidence as missing.


def _parsed(found: RankEvidence) -> RankRecord | NoRecord:
    if isinstance(found.records, NoRecord):
        return found.records
    try:
        records = [flight_record.parse(data) for data in found.records]
    except FlightRecordError:
        return NoRecord.DAMAGED
    # Treat an empty list of records as if the recorder were off. In both cases, it is unknown which
    # collectives the rank has called.
    return reduced(records, found.groups, has_raised=found.has_raised) if records else NoRecord.OFF
