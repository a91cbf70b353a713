"""Types for the input and the result of a hang diagnosis."""

from __future__ import annotations

import os
from enum import Enum
from typing import NamedTuple

from elasticrs._engine.job.phrases import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MAX_ERROR = 200


class NoRecord(str, Enum):
    NO_TORCH = "no_torch"
    OFF = "off"
    """The recorder is off (``TORCH_FR_BUFFER_SIZE=0``), or this version of torch has none."""
    LATE = "late"
    """The worker did not answer in time, for example because it holds the GIL."""
    EXITED = "exited"
    ABORTED = "aborted"
    """A native thread may have aborted the worker. gloo aborts a rank that receives more than it expects,
    which happens if the calls of the ranks differ. The aborted rank may be innocent.
    """
    RETURNED = "returned"
    """The worker's program has returned, and its interpreter runs no more Python code."""
    LOST_PEER = "lost_peer"
    """The worker raised an exception that reports a lost peer, so it was waiting."""
    LOST = "lost"
    DAMAGED = "damaged"
    OUTDATED = "outdated"
    """The rank's record lacks a collective that other ranks have completed and that needs this rank."""


class RankEvidence(NamedTuple):
    rank: int
    node: str
    records: tuple[bytes, ...] | NoRecord
    """The rank's flight records, one for each backend, or the reason why there is no record."""
    stacks: str | None = None
    """Output of ``faulthandler`` or ``py-spy``; ``None`` if unknown."""
    groups: Mapping[str, Sequence[int]] = {}
    """Global ranks of the process groups that the rank has created. gloo's records do not contain them."""
    has_raised: bool = False
    """True if the program raised an exception before the record was taken. Torch has then also marked the
    failed collective as retired.
    """
    frames: tuple[Frame, ...] = ()
    """Frames of the main thread, innermost first, if ``stacks`` is ``None``. Empty if unknown."""


class Reason(str, Enum):
    DID_NOT_ENTER = "did_not_enter"
    """Other ranks wait in a collective that these ranks have not called."""
    OTHER_OPERATION = "other_operation"
    OTHER_SIZE = "other_size"
    OTHER_TYPE = "other_type"
    NOT_STARTED = "not_started"
    """Most ranks' devices run a collective that these ranks' devices have not started."""
    NO_RECORD = "no_record"
    """Some of these ranks may be absent from a collective, but none of them has a record."""
    OTHER_ORDER = "other_order"
    """These ranks wait in one group for ranks that wait for them in another. They have probably skipped a
    collective, or used the groups in a different order.
    """
    NO_PEER = "no_peer"
    """Other ranks wait for these ranks in a point-to-point operation that these ranks have not called."""
    OUTSIDE = "outside"


class Confidence(str, Enum):
    CERTAIN = "certain"
    """The records of all ranks of the group confirm the choice."""
    LIKELY = "likely"
    """Some evidence is missing, or there are two explanations and the one with more ranks was chosen."""
    POSSIBLE = "possible"


class Call(NamedTuple):
    """Properties of a rank's call to a collective that must be the same on all ranks."""

    operation: str
    elements: int | None = None
    """Number of elements of the input; ``None`` if ranks may pass different numbers."""
    dtypes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.elements is None:
            return self.operation
        return f"{self.operation} of {self.elements:,} {'/'.join(dict.fromkeys(self.dtypes))}".rstrip()


class Side(NamedTuple):
    ranks: tuple[int, ...]
    call: Call


class StuckCollective(NamedTuple):
    """A collective that at least one rank has called, and that has not completed on all ranks."""

    backend: str
    group: str
    description: str
    """Description that the program gave the group, such as ``tp``. May be empty."""
    members: tuple[int, ...]
    are_members_known: bool
    seq: int
    """Number of the collective in its group, starting at 1."""
    operation: str
    """Operation of most of the calling ranks, without the name of the backend."""
    waiting: tuple[int, ...]
    """Ranks whose first incomplete collective in the group is this one."""
    absent: tuple[int, ...]
    unknown: tuple[int, ...]
    """Ranks whose flight records are missing or do not contain the group."""
    sides: tuple[Side, ...] = ()
    """The different calls to the collective, if they do not match. The call of most ranks comes first."""


class Culprit(NamedTuple):
    """Ranks that other ranks are waiting for, or whose calls differ from those of the other ranks."""

    ranks: tuple[int, ...]
    reason: Reason
    confidence: Confidence
    collective: StuckCollective | None
    """Collective in which other ranks are waiting, or in which the calls differ."""
    called: Call | None = None
    """Call that these ranks made, if it differs from the call of the majority; otherwise ``None``."""
    expected: Call | None = None


class Frame(NamedTuple):
    file: str
    line: int
    function: str


class MergedStack(NamedTuple):
    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]
    """Frames that these ranks share, innermost first."""


class Diagnosis(NamedTuple):
    """Explanation of a hang or a failed collective, from the flight records and stacks of all ranks."""

    summary: str
    culprits: tuple[Culprit, ...]
    """Ranks to blame, highest confidence first. Empty if the evidence points to no rank."""
    candidates: tuple[int, ...]
    """Ranks that may be to blame. Empty if a culprit is likely or certain, or if no rank waits."""
    collectives: tuple[StuckCollective, ...]
    """Collectives that have not completed. Those that explain the hang come first."""
    no_record: Mapping[NoRecord, tuple[int, ...]]
    stacks: tuple[MergedStack, ...]
    """Distinct stacks, the most frequent first."""

    def blamed(self) -> set[int]:
        """Return the ranks to blame, except those that are only possible culprits."""
        sure = (culprit for culprit in self.culprits if culprit.confidence is not Confidence.POSSIBLE)
        return {rank for culprit in sure for rank in culprit.ranks}


def failed(error: Exception) -> Diagnosis:
    """Return a diagnosis that says that a defect in elasticrs made the diagnosis fail."""
    entry, place = error.__traceback__, ""
    while entry is not None:
        place = f" at {os.path.basename(entry.tb_frame.f_code.co_filename)}:{entry.tb_lineno}"
        entry = entry.tb_next
    why = printable(f"{type(error).__name__}: {error}")[:_MAX_ERROR]
    summary = f"the diagnosis failed because of a defect in elasticrs ({why}{place})"
    return Diagnosis(summary, (), (), (), {}, ())
