"""Types for the input and the result of a hang diagnosis."""

from __future__ import annotations

import os
from enum import Enum
from typing import NamedTuple

from elasticrs._engine.job.phrases import printable, spans

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_MAX_ERROR = 200
"""Maximum length of the text of an exception in a diagnosis, in characters."""

JSON_VERSION = 1
"""Version of the JSON form of a :class:`Diagnosis`."""


class NoRecord(str, Enum):
    """Reasons why a rank has no flight record."""

    NO_TORCH = "no_torch"
    """The worker has not imported torch."""
    OFF = "off"
    """The recorder is off (``TORCH_FR_BUFFER_SIZE=0``), or this version of torch has none."""
    LATE = "late"
    """The worker did not answer in time, for example because it holds the GIL."""
    EXITED = "exited"
    ABORTED = "aborted"
    """The worker died by SIGABRT, and a native thread may have aborted it. gloo aborts a rank that receives
    more data than it expects, which happens if the calls of the ranks differ. The aborted rank may be
    innocent.
    """
    RETURNED = "returned"
    """The worker's program has returned, and its interpreter runs no more Python code."""
    LOST_PEER = "lost_peer"
    """The worker has no record, but it raised an exception that reports a lost peer, so it was waiting."""
    LOST = "lost"
    """The rank's node did not answer."""
    DAMAGED = "damaged"
    """The worker's answer is not a flight record."""
    OUTDATED = "outdated"
    """The record is outdated: other ranks have completed a collective that needs this rank, but the record
    does not contain the collective.
    """


class RankEvidence(NamedTuple):
    """Evidence about one rank."""

    rank: int
    node: str
    """Name of the rank's node."""
    records: tuple[bytes, ...] | NoRecord
    """Flight records of the rank as JSON, one for each backend; or the reason why there is no record."""
    stacks: str | None = None
    """Stacks of the rank's threads as ``faulthandler`` or ``py-spy`` prints them. ``None`` if unknown."""
    groups: Mapping[str, Sequence[int]] = {}
    """Global ranks of each process group that the rank has created, by the name of the group. They are needed
    because the records of gloo do not contain them.
    """
    has_raised: bool = False
    """True if the rank's program raised an exception before the record was taken. In that case, torch also
    marks the failed collective as retired.
    """
    frames: tuple[Frame, ...] = ()
    """Frames of the main thread, innermost first, if ``stacks`` is ``None``. Empty if unknown."""


class Reason(str, Enum):
    """Reasons why ranks are named as culprits."""

    DID_NOT_ENTER = "did_not_enter"
    """Other ranks wait in a collective that these ranks have not called."""
    OTHER_OPERATION = "other_operation"
    """These ranks called a different operation than the majority for the same collective of a group."""
    OTHER_SIZE = "other_size"
    """These ranks passed a different number of elements than the majority."""
    OTHER_TYPE = "other_type"
    """These ranks passed elements of a different type than the majority."""
    NOT_STARTED = "not_started"
    """The devices of these ranks have not started a collective that is running on the devices of the
    majority.
    """
    NO_RECORD = "no_record"
    """Other ranks wait in a collective. None of the ranks that may be absent from it has a record."""
    OTHER_ORDER = "other_order"
    """These ranks wait in one group for ranks that wait for them in another group. They have probably skipped
    a collective, or used the groups in a different order than the other ranks.
    """
    NO_PEER = "no_peer"
    """Other ranks wait for these ranks in a point-to-point operation, but these ranks are not in any
    operation.
    """
    OUTSIDE = "outside"
    """Other ranks wait, but these ranks are not in a collective."""


class Confidence(str, Enum):
    """Confidence that the blamed ranks caused the hang."""

    CERTAIN = "certain"
    """The records of all ranks of the group confirm the choice."""
    LIKELY = "likely"
    """Some evidence is missing, or there are two explanations and the one with more ranks was chosen."""
    POSSIBLE = "possible"
    """The evidence does not rule out that another rank is to blame."""


class Call(NamedTuple):
    """Properties of a rank's call to a collective. They must be the same on all ranks."""

    operation: str
    elements: int | None = None
    """Number of elements of the input. ``None`` if ranks may pass different numbers."""
    dtypes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a readable description, such as ``all_reduce of 4 Float``."""
        if self.elements is None:
            return self.operation
        return f"{self.operation} of {self.elements:,} {'/'.join(dict.fromkeys(self.dtypes))}".rstrip()


class Side(NamedTuple):
    """A call to a collective, and the ranks that made this call."""

    ranks: tuple[int, ...]
    call: Call


class StuckCollective(NamedTuple):
    """A collective that at least one rank has called, and that has not completed on all ranks."""

    backend: str
    group: str
    description: str
    """Description that the program gave the group, such as ``tp``. May be empty."""
    members: tuple[int, ...]
    """Known ranks of the group."""
    are_members_known: bool
    seq: int
    """Number of the collective in its group, starting at 1."""
    operation: str
    """Operation that most of the calling ranks called, without the name of the backend."""
    waiting: tuple[int, ...]
    """Ranks whose first incomplete collective in the group is this one."""
    absent: tuple[int, ...]
    """Ranks that have not called the collective."""
    unknown: tuple[int, ...]
    """Ranks that may or may not have called the collective, because they have no record of the group."""
    sides: tuple[Side, ...] = ()
    """The different calls and their ranks, if the calls do not match. The call of most ranks comes first."""


class Culprit(NamedTuple):
    """Ranks that other ranks are waiting for, or whose calls differ from those of the other ranks."""

    ranks: tuple[int, ...]
    reason: Reason
    confidence: Confidence
    collective: StuckCollective | None
    """Collective in which other ranks are waiting, or in which the calls differ."""
    called: Call | None = None
    """Call of these ranks. ``None`` unless it differs from the call of the majority."""
    expected: Call | None = None
    """Call of the majority. ``None`` if ``called`` is ``None``."""


class Frame(NamedTuple):
    """A Python frame."""

    file: str
    line: int
    function: str


class MergedStack(NamedTuple):
    """A stack of the main thread, and the ranks whose main threads have this stack."""

    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]
    """Frames of the stack, innermost first."""


class Diagnosis(NamedTuple):
    """Explanation of a hang or a failed collective, based on the flight records and stacks of all ranks."""

    summary: str
    """One paragraph for people."""
    ranks: int
    """Number of ranks."""
    culprits: tuple[Culprit, ...]
    """Ranks to blame, sorted by confidence, highest first. Empty if the evidence points to no rank."""
    candidates: tuple[int, ...]
    """Ranks that may be to blame. Empty if a culprit is likely or certain, or if no rank waits."""
    collectives: tuple[StuckCollective, ...]
    """Collectives that have not completed. Those that explain the hang come first."""
    no_record: Mapping[NoRecord, tuple[int, ...]]
    """Ranks without a usable record, by reason."""
    stacks: tuple[MergedStack, ...]
    """Stacks of the ranks, most frequent first."""
    evidence: tuple[str, ...]
    """Lines for people with the evidence for the summary."""

    def blamed(self) -> set[int]:
        """Return the ranks to blame, except those that are only possible culprits."""
        sure = (culprit for culprit in self.culprits if culprit.confidence is not Confidence.POSSIBLE)
        return {rank for culprit in sure for rank in culprit.ranks}

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values, with the schema in ``docs/design/diagnosis.md``. Ranks are
        written as inclusive ranges, such as ``[[0, 3], [8, 31]]``.
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
            "candidates": spans(self.candidates),
            "collectives": [_collective(stuck) for stuck in self.collectives],
            "no_record": {reason.value: spans(ranks) for reason, ranks in self.no_record.items()},
            "stacks": [
                {"ranks": spans(merged.ranks), "frames": [list(frame) for frame in merged.frames]}
                for merged in self.stacks
            ],
            "evidence": list(self.evidence),
        }


def failed(error: Exception, ranks: int = 0) -> Diagnosis:
    """Return a diagnosis whose only content is that the diagnosis failed because of a defect in elasticrs.

    Args:
        error: exception that the code of the diagnosis has raised.
        ranks: number of ranks of the job; 0 if unknown.
    """
    entry, place = error.__traceback__, ""
    while entry is not None:
        place = f" at {os.path.basename(entry.tb_frame.f_code.co_filename)}:{entry.tb_lineno}"
        entry = entry.tb_next
    why = printable(f"{type(error).__name__}: {error}")[:_MAX_ERROR]
    summary = f"the diagnosis failed because of a defect in elasticrs ({why}{place})"
    return Diagnosis(summary, ranks, (), (), (), {}, (), ())


def _collective(stuck: StuckCollective) -> dict[str, Any]:
    ranks = {name: spans(getattr(stuck, name)) for name in ("members", "waiting", "absent", "unknown")}
    sides = [{"ranks": spans(side.ranks), "called": str(side.call)} for side in stuck.sides]
    return {**stuck._asdict(), **ranks, "sides": sides}
