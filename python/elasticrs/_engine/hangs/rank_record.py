"""Reduces one rank's flight records to the calls and group members that a diagnosis compares between ranks.

Nodes also exchange their ranks' records in this reduced form, because torch's own records contain many
details that a diagnosis does not use.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from elasticrs._engine.hangs.flight_record import State
from elasticrs._engine.hangs.values import Call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticrs._engine.hangs.flight_record import Entry, FlightRecord, Sizes
    from elasticrs._engine.hangs.values import Frame, NoRecord

DEFAULT_GROUP = "default_pg"
"""Torch's description of the default process group, which contains all ranks."""

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
"""Maps the variants of an operation to a common name, because ranks may call different variants for the same
collective.
"""

_SAME_ON_ALL_RANKS = frozenset(("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"))
"""Operations whose input has the same element count and element type on all ranks."""


class Step(NamedTuple):
    """A collective as recorded by one rank."""

    call: Call
    is_complete: bool
    is_started: bool
    """True if the collective has started on the rank's device."""


class GroupSteps(NamedTuple):
    """One rank's collectives in one process group."""

    description: str
    steps: Mapping[int, Step]
    """Steps, keyed by the collective's sequence number. Never empty."""


class Transfer(NamedTuple):
    """An incomplete point-to-point operation."""

    group: str
    description: str
    """The group's description, as set by the program."""
    peer: int | None
    """The peer's rank within the group. ``None`` if unknown."""


class RankRecord(NamedTuple):
    """One rank's flight records, reduced to the fields that a diagnosis uses."""

    groups: Mapping[tuple[str, str], GroupSteps]
    """Collectives, keyed by the group's backend and name."""
    members: Mapping[str, tuple[int, ...]] = {}
    """Global ranks of each process group's members, keyed by group name. Groups whose members are unknown are
    left out.
    """
    transfers: tuple[Transfer, ...] = ()
    is_truncated: bool = False
    """True if torch's buffer was full, so that older operations were overwritten."""
    has_raised: bool = False


class RankFacts(NamedTuple):
    """Parsed evidence about one rank."""

    rank: int
    node: str
    """Name of the rank's node. Empty if unknown."""
    record: RankRecord | NoRecord
    """The reduced flight records, or the reason why there are none."""
    frames: tuple[Frame, ...] = ()
    """The main thread's stack frames, innermost first. Empty if the stack is unknown."""


def reduced(
    records: Sequence[FlightRecord], groups: Mapping[str, Sequence[int]], *, has_raised: bool
) -> RankRecord:
    """Reduce one rank's flight records.

    Args:
        records: the rank's flight records, one from each of torch's recorders.
        groups: global ranks of each process group's members, keyed by group name, as reported by the worker.
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
            # Mark the last collective as incomplete, because it may have failed and caused the exception. The
            # record cannot show this, because torch marks failed and completed collectives alike.
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
    """Collectives that one rank has called in one process group. Filled while the flight records are being
    read.
    """

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
                # Keep only the latest group with this name, because a program that recreates its groups
                # reuses their names.
                draft = drafts[key] = _Draft(entry.group_id, entry.group_description, {})
            if entry.group_id == draft.group_id:
                draft.steps[entry.collective_seq_id] = reader.read(
                    entry, draft.steps.get(entry.collective_seq_id)
                )
    return drafts


class _CallReader:
    """Converts the entries of a flight record to :class:`Step` objects. Equal calls share one object, because
    most entries repeat an earlier call.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[str, Sizes, tuple[str, ...]], Call] = {}

    def read(self, entry: Entry, earlier: Step | None) -> Step:
        """Convert an entry to a step.

        Args:
            entry: the entry.
            earlier: step built from the earlier entries of the same collective, because a coalesced
                collective has several entries; ``None`` if this is the first entry.
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
    """Parse the peer's rank within the group from the name of an operation, such as ``send 0->1`` or
    ``recv 0<-1``. Return ``None`` if the name contains no rank.
    """
    for arrow in ("->", "<-"):
        _, found, peer = operation.partition(arrow)
        if found and peer.isascii() and peer.isdigit() and len(peer) < 10:
            return int(peer)
    return None
