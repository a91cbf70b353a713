"""Reduces the flight records of one rank to the facts that are compared between ranks.

Torch records more than that about each operation, so the reduced record is also the form in which nodes send
the records of their ranks to each other.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from elasticrs.diagnosis.flight_record import State
from elasticrs.diagnosis.values import Call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticrs.diagnosis.flight_record import Entry, FlightRecord, Sizes
    from elasticrs.diagnosis.values import Frame, NoRecord

DEFAULT_GROUP = "default_pg"
"""Torch's description of the default group, which contains all ranks."""

_NAMES = {
    "_all_gather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce_barrier": "barrier",
    "all_to_all_single": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
}
"""Common names for the variants of an operation, because ranks may take part in the same collective through
different variants.
"""

_SAME_ON_ALL_RANKS = frozenset(("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"))
"""Operations whose input has the same number and type of elements on all ranks."""


class Step(NamedTuple):
    """One collective of one rank."""

    call: Call
    is_complete: bool
    is_started: bool
    """True if the device has started the collective."""


class GroupSteps(NamedTuple):
    """The collectives of one rank in one process group."""

    description: str
    steps: Mapping[int, Step]
    """Steps, keyed by the number of the collective. There is at least one."""


class Transfer(NamedTuple):
    """A point-to-point operation that has not completed."""

    group: str
    description: str
    """Description that the program gave the group."""
    peer: int | None
    """Rank of the peer in the group. ``None`` if it is unknown."""


class RankRecord(NamedTuple):
    """The reduced flight records of one rank, and further facts about it."""

    groups: Mapping[tuple[str, str], GroupSteps]
    """Collectives, keyed by the backend and the name of the group."""
    members: Mapping[str, tuple[int, ...]] = {}
    """Global ranks of each process group, by the name of the group, as far as they are known."""
    transfers: tuple[Transfer, ...] = ()
    is_truncated: bool = False
    """True if older operations were overwritten, because a buffer of torch was full."""
    has_raised: bool = False


class RankFacts(NamedTuple):
    """The parsed evidence about one rank."""

    rank: int
    node: str
    """Name of the rank's node. Empty if it is unknown."""
    record: RankRecord | NoRecord
    """The reduced flight records, or the reason why there is none."""
    frames: tuple[Frame, ...] = ()
    """Frames of the main thread, innermost first. Empty if the stack is unknown."""


def reduced(
    records: Sequence[FlightRecord], groups: Mapping[str, Sequence[int]], *, has_raised: bool
) -> RankRecord:
    """Reduce the flight records of one rank.

    Args:
        records: records of the rank, one for each recorder of torch.
        groups: global ranks of each process group by its name, as reported by the worker.
        has_raised: true if the rank's program raised an exception before the records were taken.
    """
    drafts = _drafts(records)
    transfers = tuple(
        dict.fromkeys(
            Transfer(entry.group_name, entry.group_description, _peer(entry.operation))
            for record in records
            for entry in record.entries
            if entry.is_p2p and not entry.is_complete
        )
    )
    if has_raised:
        for draft in drafts.values():
            # Mark the last collective as incomplete, because torch marks a failed collective as retired, like
            # a completed one.
            last = max(draft.steps)
            draft.steps[last] = draft.steps[last]._replace(is_complete=False)
    members = {name: tuple(sorted(set(ranks))) for name, ranks in groups.items()}
    for record in reversed(records):
        members.update(record.members)
    names = {name for _, name in drafts} | {transfer.group for transfer in transfers}
    return RankRecord(
        {key: GroupSteps(draft.description, draft.steps) for key, draft in drafts.items()},
        {name: members[name] for name in sorted(names) if members.get(name)},
        transfers,
        any(record.is_truncated for record in records),
        has_raised,
    )


class _Draft(NamedTuple):
    """Steps of one rank in a group, while the entries of the record are being read."""

    group_id: int
    description: str
    steps: dict[int, Step]


def _drafts(records: Sequence[FlightRecord]) -> dict[tuple[str, str], _Draft]:
    drafts: dict[tuple[str, str], _Draft] = {}
    reader = _CallReader()
    for flight_record in records:
        for entry in flight_record.entries:
            if entry.is_p2p:
                continue
            key = entry.backend, entry.group_name
            draft = drafts.get(key)
            if draft is None or entry.group_id > draft.group_id:
                # Use only the latest group of this name, because a program that creates its groups again uses
                # the same names.
                draft = drafts[key] = _Draft(entry.group_id, entry.group_description, {})
            if entry.group_id == draft.group_id:
                draft.steps[entry.collective_seq_id] = reader.read(
                    entry, draft.steps.get(entry.collective_seq_id)
                )
    return drafts


class _CallReader:
    """Converts entries to steps. Equal calls share one object, because most entries repeat the same call."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, Sizes, tuple[str, ...]], Call] = {}

    def read(self, entry: Entry, earlier: Step | None) -> Step:
        """Convert an entry. A coalesced collective has several entries; ``earlier`` is the step of the
        entries that were already converted.
        """
        key = entry.operation, entry.input_sizes, entry.input_dtypes
        call = self._calls.get(key)
        if call is None:
            operation = _NAMES.get(entry.operation, entry.operation)
            if operation in _SAME_ON_ALL_RANKS:
                elements = sum(map(prod, entry.input_sizes))
                call = Call(operation, elements, entry.input_dtypes)
            else:
                call = Call(operation)
            self._calls[key] = call
        is_complete, is_started = entry.is_complete, entry.state is not State.SCHEDULED
        if earlier is not None:
            call = Call("coalesced")
            is_complete, is_started = is_complete or earlier.is_complete, is_started or earlier.is_started
        return Step(call, is_complete, is_started)


def _peer(operation: str) -> int | None:
    """Return the peer's rank in the group, from the name of an operation such as ``send 0->1`` or ``recv
    0<-1``.
    """
    for arrow in ("->", "<-"):
        _, found, peer = operation.partition(arrow)
        if found and peer.isascii() and peer.isdigit() and len(peer) < 10:
            return int(peer)
    return None
