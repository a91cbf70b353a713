"""Matches the flight records of all ranks, to find the collectives that have not completed, the ranks that
have not called them, and the ranks whose calls differ.

- **COL-1** A rank counts as absent from a collective only if its record covers the group: the record contains
  a call in this group, or no entry of the record was overwritten.
- **COL-2** A record that contradicts the others is not used. If a rank has completed a collective that needs
  data from every rank, but the record of another rank does not contain that collective, this record is
  outdated.
- **COL-3** The result does not depend on the order of the ranks.

The members of a group are known from the records (NCCL) or from the workers. The default group has all ranks
as its members. For any other group, only the ranks that have called one of its collectives are known.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from elasticrs.diagnosis.flight_record import State
from elasticrs.diagnosis.values import Call, NoRecord, Side, StuckCollective

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elasticrs.diagnosis.flight_record import Entry, FlightRecord, Sizes

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

_NEEDS_ALL_RANKS = frozenset(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))
"""Operations that complete on no rank before all ranks have called them."""


class Step(NamedTuple):
    """One collective of one rank."""

    call: Call
    is_complete: bool
    is_started: bool
    """True if the device has started the collective."""


class Track(NamedTuple):
    """The collectives of one rank in one group."""

    steps: Mapping[int, Step]
    """Steps, keyed by the number of the collective."""
    entered: int
    """Number of the last collective that the rank has called. 0 if the rank has called none."""
    waits_in: int | None
    """Number of the first collective that has not completed. ``None`` if all have completed."""


class Group(NamedTuple):
    """A process group, as seen in the records of the ranks."""

    backend: str
    name: str
    description: str
    members: tuple[int, ...]
    are_members_known: bool
    tracks: Mapping[int, Track]
    """Track of each rank. A member without a track has no record that covers this group (**COL-1**)."""


class RankRecord(NamedTuple):
    """The parsed flight records of one rank, and further facts about it."""

    records: Sequence[FlightRecord]
    groups: Mapping[str, Sequence[int]] = {}
    """Global ranks of each process group by its name, as reported by the worker."""
    has_raised: bool = False


class Matched(NamedTuple):
    """Result of matching the records of all ranks."""

    stuck: tuple[StuckCollective, ...]
    """Collectives that have not completed, and those whose calls do not match."""
    not_started: Mapping[StuckCollective, tuple[int, ...]]
    """For each collective that runs on the devices of most ranks, the ranks whose devices have not started
    it.
    """
    receiving: Mapping[int, tuple[int, ...]]
    """For each rank in a point-to-point operation, the ranks that it waits for. Empty if these ranks are
    unknown.
    """
    no_record: Mapping[int, NoRecord]
    """Ranks without a usable record, including ranks whose records are outdated."""


def match(ranks: Mapping[int, RankRecord | NoRecord]) -> Matched:
    """Match the flight records of all ranks.

    Args:
        ranks: records by rank, for all ranks of the job.
    """
    usable = {rank: record for rank, record in sorted(ranks.items()) if isinstance(record, RankRecord)}
    no_record = {rank: record for rank, record in sorted(ranks.items()) if isinstance(record, NoRecord)}
    world = tuple(sorted(ranks))
    groups = _groups(usable, world)
    outdated = {rank for group in groups for rank in _outdated(group, usable)}
    if outdated:
        usable = {rank: record for rank, record in usable.items() if rank not in outdated}
        no_record |= dict.fromkeys(outdated, NoRecord.OUTDATED)
        groups = _groups(usable, world)
    stuck: list[StuckCollective] = []
    not_started = {}
    for group in groups:
        mismatch = _mismatch(group)
        found = _stuck(group, mismatch)
        stuck += found
        for collective in found:
            late = _not_started(group, collective)
            if late:
                not_started[collective] = late
    return Matched(tuple(stuck), not_started, _receiving(usable, world), dict(sorted(no_record.items())))


# --- groups ---


class _Draft(NamedTuple):
    """Steps of one rank in a group, while the entries of the record are being read."""

    group_id: int
    description: str
    steps: dict[int, Step]


def _groups(ranks: Mapping[int, RankRecord], world: tuple[int, ...]) -> list[Group]:
    drafts: dict[tuple[str, str], dict[int, _Draft]] = {}
    backends: dict[str, set[str]] = {}
    reader = _CallReader()
    for rank, record in ranks.items():
        for key, draft in _drafts(record, reader).items():
            drafts.setdefault(key, {})[rank] = draft
            backends.setdefault(key[1], set()).add(key[0])
    groups = []
    for (backend, name), by_rank in sorted(drafts.items()):
        for members, is_known, inside in _memberships(name, by_rank, ranks, world):
            tracks = {rank: _track(by_rank[rank].steps) for rank in inside}
            for rank in members:
                is_idle = rank in ranks and rank not in tracks
                if is_idle and not any(record.is_truncated for record in ranks[rank].records):
                    tracks[rank] = Track({}, 0, None)
            description = by_rank[inside[0]].description
            groups.append(Group(backend, name, description, members, is_known, tracks))
    return groups


def _drafts(record: RankRecord, reader: _CallReader) -> dict[tuple[str, str], _Draft]:
    drafts: dict[tuple[str, str], _Draft] = {}
    for flight_record in record.records:
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
    if record.has_raised:
        for draft in drafts.values():
            # Mark the last collective as incomplete, because torch marks a failed collective as retired, like
            # a completed one.
            last = max(draft.steps)
            draft.steps[last] = draft.steps[last]._replace(is_complete=False)
    return drafts


def _memberships(
    name: str, by_rank: Mapping[int, _Draft], ranks: Mapping[int, RankRecord], world: tuple[int, ...]
) -> list[tuple[tuple[int, ...], bool, list[int]]]:
    """Return the different groups with this name. Groups without a common rank may have the same name. For
    each group, return the members, whether all members are known, and the ranks with entries.
    """
    known: dict[tuple[int, ...], list[int]] = {}
    unknown = []
    for rank in by_rank:
        members = _members_known_to(ranks[rank], name)
        if rank in members:
            known.setdefault(members, []).append(rank)
        else:
            unknown.append(rank)
    found = []
    for rank in unknown:
        homes = [members for members in known if rank in members]
        if len(homes) == 1:
            known[homes[0]].append(rank)
        else:
            found.append(rank)
    result = [(members, True, sorted(inside)) for members, inside in sorted(known.items())]
    if found:
        is_default = not known and all(by_rank[rank].description == DEFAULT_GROUP for rank in found)
        result.append((world if is_default else tuple(found), is_default, found))
    return result


def _members_known_to(record: RankRecord, name: str) -> tuple[int, ...]:
    for flight_record in record.records:
        if name in flight_record.members:
            return flight_record.members[name]
    return tuple(sorted(set(record.groups.get(name, ()))))


def _track(steps: Mapping[int, Step]) -> Track:
    waits_in = min((seq for seq, step in steps.items() if not step.is_complete), default=None)
    return Track(steps, max(steps), waits_in)


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


# --- contradictions ---


def _outdated(group: Group, ranks: Mapping[int, RankRecord]) -> set[int]:
    """Return the ranks whose records are outdated, according to the records of other ranks of this group
    (**COL-2**).
    """
    reached = max(
        (
            seq
            for rank, track in group.tracks.items()
            if not ranks[rank].has_raised
            for seq, step in track.steps.items()
            if step.is_complete and step.call.operation in _NEEDS_ALL_RANKS and step.call.elements != 0
        ),
        default=0,
    )
    return {rank for rank, track in group.tracks.items() if track.entered < reached}


# --- calls that do not match ---


class _Mismatch(NamedTuple):
    seq: int
    sides: tuple[Side, ...]


def _mismatch(group: Group) -> _Mismatch | None:
    """Return the first collective whose calls do not match.

    Ignore such a collective if it has completed on all ranks and the calls of all later collectives match,
    because the ranks may then have used variants of an operation that this module does not know.
    """
    calls: dict[int, dict[Call, list[int]]] = {}
    incomplete = set()
    for rank in sorted(group.tracks):
        for seq, step in group.tracks[rank].steps.items():
            calls.setdefault(seq, {}).setdefault(step.call, []).append(rank)
            if not step.is_complete:
                incomplete.add(seq)
    differing = sorted(seq for seq, by_call in calls.items() if len(by_call) > 1)
    for seq in differing:
        if seq in incomplete or seq < differing[-1]:
            sides = [Side(tuple(ranks), call) for call, ranks in calls[seq].items()]
            return _Mismatch(seq, tuple(sorted(sides, key=lambda side: (-len(side.ranks), side.ranks))))
    return None


# --- collectives that have not completed ---


def _stuck(group: Group, mismatch: _Mismatch | None) -> list[StuckCollective]:
    waiting: dict[int, list[int]] = {}
    for rank in sorted(group.tracks):
        waits_in = group.tracks[rank].waits_in
        if waits_in is not None:
            waiting.setdefault(waits_in, []).append(rank)
    if mismatch is not None:
        waiting.setdefault(mismatch.seq, [])
    found = []
    for seq, ranks in sorted(waiting.items()):
        sides = mismatch.sides if mismatch is not None and mismatch.seq == seq else ()
        found.append(
            StuckCollective(
                group.backend,
                group.name,
                group.description,
                group.members,
                group.are_members_known,
                seq,
                _operation(group, seq),
                tuple(ranks),
                tuple(rank for rank in sorted(group.tracks) if group.tracks[rank].entered < seq),
                tuple(rank for rank in group.members if rank not in group.tracks),
                sides,
            )
        )
    return found


def _operation(group: Group, seq: int) -> str:
    operations = [track.steps[seq].call.operation for track in group.tracks.values() if seq in track.steps]
    return most_frequent(operations)


def _not_started(group: Group, collective: StuckCollective) -> tuple[int, ...]:
    if collective.absent or collective.unknown or collective.sides or not collective.are_members_known:
        return ()
    steps = {rank: track.steps.get(collective.seq) for rank, track in group.tracks.items()}
    late = tuple(rank for rank, step in sorted(steps.items()) if step is not None and not step.is_started)
    is_minority = collective.backend != "gloo" and 2 * len(late) < len(group.members)
    return late if is_minority else ()


def most_frequent(names: Iterable[str]) -> str:
    """Return the most frequent name. If several names are equally frequent, return the alphabetically first
    one.
    """
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return min(counts, key=lambda name: (-counts[name], name))


# --- point-to-point operations ---


def _receiving(ranks: Mapping[int, RankRecord], world: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Return, for each rank in an incomplete point-to-point operation, the peers that it waits for."""
    receiving: dict[int, set[int]] = {}
    for rank, record in ranks.items():
        for flight_record in record.records:
            for entry in flight_record.entries:
                if entry.is_p2p and not entry.is_complete:
                    peers = receiving.setdefault(rank, set())
                    members = _members_known_to(record, entry.group_name)
                    if not members and entry.group_description == DEFAULT_GROUP:
                        members = world
                    peer = _peer(entry.operation)
                    if peer is not None and peer < len(members):
                        peers.add(members[peer])
    return {rank: tuple(sorted(peers)) for rank, peers in sorted(receiving.items())}


def _peer(operation: str) -> int | None:
    """Return the peer's rank in the group, from the name of an operation such as ``send 0->1`` or ``recv
    0<-1``.
    """
    for arrow in ("->", "<-"):
        _, found, peer = operation.partition(arrow)
        if found and peer.isascii() and peer.isdigit() and len(peer) < 10:
            return int(peer)
    return None
