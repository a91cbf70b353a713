"""Input and output of a diagnosis."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

JSON_VERSION = 1
"""Version of the JSON form of a :class:`Diagnosis`."""


class NoRecord(str, Enum):
    """Reasons why there is no flight record of a rank."""

    NO_TORCH = "no_torch"
    """The worker has not imported torch."""
    OFF = "off"
    """The recorder is off (``TORCH_FR_BUFFER_SIZE=0``), or this version of torch has none."""
    LATE = "late"
    """The worker did not answer in time, for example because it holds the GIL."""
    EXITED = "exited"
    LOST = "lost"
    """The rank's node did not answer."""
    DAMAGED = "damaged"
    """The worker's answer is not a flight record."""
    OUTDATED = "outdated"
    """The record is older than those of other ranks, which have completed collectives that need this rank."""


class RankEvidence(NamedTuple):
    """Evidence about one rank."""

    rank: int
    node: str
    """Name of the rank's node."""
    records: tuple[bytes, ...] | NoRecord
    """Flight records of the rank as JSON, one for each backend. Otherwise, the reason why there is none."""
    stacks: str | None = None
    """Stacks of the rank's threads as ``faulthandler`` or ``py-spy`` prints them. ``None`` if unknown."""
    groups: Mapping[str, Sequence[int]] = {}
    """Global ranks of each process group that the rank has created, by the name of the group. The records of
    gloo do not contain them.
    """
    has_raised: bool = False
    """True if an exception of the rank's program came before the record. Then torch also marks the collective
    that failed as retired.
    """


class Reason(str, Enum):
    """Reasons why ranks are named as culprits."""

    DID_NOT_ENTER = "did_not_enter"
    """Other ranks wait in a collective that these ranks have not called."""
    OTHER_OPERATION = "other_operation"
    """These ranks called another operation than the majority as the same collective of a group."""
    OTHER_SIZE = "other_size"
    """These ranks passed another number of elements than the majority."""
    OTHER_TYPE = "other_type"
    """These ranks passed elements of another type than the majority."""
    NOT_STARTED = "not_started"
    """The devices of these ranks have not started the collective that the devices of the majority run."""
    NO_RECORD = "no_record"
    """Other ranks wait, and all ranks that might be missing have no record."""
    OTHER_ORDER = "other_order"
    """These ranks wait in one group for ranks that wait for them in another group. They have probably skipped
    a collective, or called the groups in another order than the others.
    """
    NO_PEER = "no_peer"
    """Other ranks wait for these ranks in a point-to-point operation, and these ranks are in no operation."""
    OUTSIDE = "outside"
    """Other ranks wait, and these ranks are not in a collective."""


class Confidence(str, Enum):
    """Confidence in the choice of a culprit."""

    CERTAIN = "certain"
    """The records of all ranks of the group show it."""
    LIKELY = "likely"
    """Some evidence is missing, or the majority decided between two explanations."""
    POSSIBLE = "possible"
    """The evidence does not exclude that another rank is to blame."""


class Call(NamedTuple):
    """What one rank passed to a collective, as far as it has to be the same on all ranks."""

    operation: str
    elements: int | None = None
    """Number of elements of the input. ``None`` if ranks may pass different numbers."""
    dtypes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a description for people: ``all_reduce of 4 Float``."""
        if self.elements is None:
            return self.operation
        return f"{self.operation} of {self.elements:,} {'/'.join(dict.fromkeys(self.dtypes))}".rstrip()


class Side(NamedTuple):
    """Ranks that called the same operation as a collective of a group."""

    ranks: tuple[int, ...]
    call: Call


class StuckCollective(NamedTuple):
    """A collective that at least one rank has called and that has not completed everywhere."""

    backend: str
    group: str
    description: str
    """Description that the program gave the group, such as ``tp``. May be empty."""
    members: tuple[int, ...]
    """Ranks of the group, as far as they are known."""
    are_members_known: bool
    seq: int
    """Number of the collective in its group, starting at 1."""
    operation: str
    """Operation of the majority of the ranks that called it, without the backend."""
    waiting: tuple[int, ...]
    """Ranks for which this is the first incomplete collective of the group."""
    absent: tuple[int, ...]
    """Ranks that have not called it."""
    unknown: tuple[int, ...]
    """Ranks of the group whose position is unknown, because they have no record of it."""
    sides: tuple[Side, ...] = ()
    """The different calls of the ranks if they do not match. The largest side comes first."""


class Culprit(NamedTuple):
    """Ranks that other ranks are waiting for, or whose calls do not match those of the others."""

    ranks: tuple[int, ...]
    reason: Reason
    confidence: Confidence
    collective: StuckCollective | None
    """Collective in which other ranks are waiting, or in which the calls differ."""
    called: Call | None = None
    """Call of these ranks if it differs from that of the majority."""
    expected: Call | None = None
    """Call of the majority, if ``called`` is given."""


class Frame(NamedTuple):
    """A Python frame."""

    file: str
    line: int
    function: str


class MergedStack(NamedTuple):
    """A stack of the main thread, and the ranks that have it."""

    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]
    """Frames of the stack. The innermost one comes first."""


class Diagnosis(NamedTuple):
    """Result of examining the evidence about all ranks."""

    summary: str
    """One paragraph for people."""
    ranks: int
    """Number of ranks."""
    culprits: tuple[Culprit, ...]
    """Ranks to blame. The most certain ones come first. Empty if the evidence points at no rank."""
    collectives: tuple[StuckCollective, ...]
    """Collectives that have not completed. The ones that explain the hang come first."""
    no_record: Mapping[NoRecord, tuple[int, ...]]
    """Ranks without a usable record, by reason."""
    stacks: tuple[MergedStack, ...]
    """Stacks of the ranks. The most frequent one comes first."""
    evidence: tuple[str, ...]
    """Lines for people with the facts behind the summary."""

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values. ``docs/design/diagnosis.md`` has the schema. Ranks are written
        as inclusive spans, ``[[0, 3], [8, 31]]``.
        """
        return {
            "version": JSON_VERSION,
            "summary": self.summary,
            "ranks": self.ranks,
            "culprits": [
                {
                    "ranks": spans(culprit.ranks),
                    "reason": culprit.reason.value,
                    "confidence": culprit.confidence.value,
                    "collective": _collective(culprit.collective) if culprit.collective else None,
                    "called": str(culprit.called or ""),
                    "expected": str(culprit.expected or ""),
                }
                for culprit in self.culprits
            ],
            "collectives": [_collective(stuck) for stuck in self.collectives],
            "no_record": {reason.value: spans(ranks) for reason, ranks in self.no_record.items()},
            "stacks": [
                {"ranks": spans(merged.ranks), "frames": [list(frame) for frame in merged.frames]}
                for merged in self.stacks
            ],
            "evidence": list(self.evidence),
        }


def _collective(stuck: StuckCollective) -> dict[str, Any]:
    return {
        "backend": stuck.backend,
        "group": stuck.group,
        "description": stuck.description,
        "members": spans(stuck.members),
        "are_members_known": stuck.are_members_known,
        "seq": stuck.seq,
        "operation": stuck.operation,
        "waiting": spans(stuck.waiting),
        "absent": spans(stuck.absent),
        "unknown": spans(stuck.unknown),
        "sides": [{"ranks": spans(side.ranks), "called": str(side.call)} for side in stuck.sides],
    }


def spans(ranks: Sequence[int]) -> list[list[int]]:
    """Return ascending ranks as inclusive spans."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found
