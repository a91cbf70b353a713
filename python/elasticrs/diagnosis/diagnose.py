"""Diagnoses why a job does not make progress, from the evidence about all of its ranks."""

from __future__ import annotations

from elasticrs.diagnosis import flight_record
from elasticrs.diagnosis.collectives import RankRecord, match
from elasticrs.diagnosis.culprits import blame
from elasticrs.diagnosis.flight_record import FlightRecordError
from elasticrs.diagnosis.paragraph import Writer
from elasticrs.diagnosis.stacks import main_thread, merge
from elasticrs.diagnosis.values import Diagnosis, NoRecord

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticrs.diagnosis.values import RankEvidence


def diagnose(evidence: Iterable[RankEvidence]) -> Diagnosis:
    """Name the ranks that keep a job from making progress. Pure function.

    A record that cannot be parsed counts as missing, so no input raises an exception.

    Args:
        evidence: evidence about each rank of the job, in any order.
    """
    by_rank = {found.rank: found for found in sorted(evidence, key=lambda found: found.rank)}
    matched = match({rank: _parsed(found) for rank, found in by_rank.items()})
    stacks = {rank: main_thread(found.stacks) for rank, found in by_rank.items() if found.stacks}
    merged = merge(stacks)
    culprits = blame(matched, stacks, tuple(by_rank))
    blamed = {culprit.collective for culprit in culprits}
    stuck = tuple(sorted(matched.stuck, key=lambda stuck: (stuck not in blamed, -len(stuck.waiting))))
    writer = Writer({rank: found.node for rank, found in by_rank.items()}, stacks, matched.no_record)
    no_record = {
        reason: tuple(rank for rank, why in matched.no_record.items() if why is reason) for reason in NoRecord
    }
    return Diagnosis(
        summary=writer.summary(culprits, stuck),
        ranks=len(by_rank),
        culprits=culprits,
        collectives=stuck,
        no_record={reason: ranks for reason, ranks in no_record.items() if ranks},
        stacks=merged,
        evidence=writer.evidence(stuck, merged),
    )


def _parsed(found: RankEvidence) -> RankRecord | NoRecord:
    if isinstance(found.records, NoRecord):
        return found.records
    try:
        records = [flight_record.parse(data) for data in found.records]
    except FlightRecordError:
        return NoRecord.DAMAGED
    # Treat an empty list of records as if the recorder were off. In both cases, it is unknown which
    # collectives the rank has called.
    return RankRecord(records, found.groups, found.has_raised) if records else NoRecord.OFF
