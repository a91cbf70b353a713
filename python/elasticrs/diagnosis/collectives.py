"""Matches the flight records of all ranks: which collectives have not completed, who has not called them, and
whose calls differ.

- **COL-1** A rank counts as absent from a collective only if its record covers the group: either the record
  contains a call of the group, or nothing has been overwritten in it.
- **COL-2** A record that contradicts the others is not used. If a rank has completed a collective that needs
  data of every rank, a record in which another rank has not called it is older.
- **COL-3** The result does not depend on the order of the ranks.

The membership of a group comes from the record of the rank (NCCL), from the worker, or is known because the
default group has all ranks. Otherwise, only the ranks that have called a collective of the group are known.
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
"""torch's description of the group of all ranks."""

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
"""Common names of operations. Ranks may call different variants of an operation as the same collective."""

_SAME_ON_ALL_RANKS = frozenset(("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"))
"""Operations whose input has the same number and type of elements on all ranks."""

_NEEDS_ALL_RANKS = frozenset(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))
"""Operations that complete on no rank before all ranks have called them."""


class Step(NamedTuple):
    """One collective of one rank."""

    call: Call
    is_complete: bool
    is_started: bool
    """True if the device has started it."""


class Track(NamedTuple):
    """The collectives of one rank in one group."""

    steps: Mapping[int, Step]
    """By number of the collective."""
    entered: int
    """Number of the last collective that the rank has called. 0 if it has called none."""
    waits_in: int | None
    """Number of the first collective that has not completed. ``None`` if all have."""


class Group(NamedTuple):
    """A process group, as the ranks' records show it."""

    backend: str
    name: str
    description: str
    members: tuple[int, ...]
    are_members_known: bool
    tracks: Mapping[int, Track]
    """By rank. A member without a track has no record of this group (**COL-1**)."""


class RankRecord(NamedTuple):
    """The parsed flight records of one rank, and further facts about it."""

    records: Sequence[FlightRecord]
    groups: Mapping[str, Sequence[int]] = {}
    """Global ranks of the rank's groups by name, as the worker knows them."""
    has_raised: bool = False


class Matched(NamedTuple):
    """Result of matching the records of all ranks."""

    stuck: tuple[StuckCollective, ...]
    """Collectives that have not completed, and those whose calls do not match."""
    not_started: Mapping[StuckCollective, tuple[int, ...]]
    """Ranks whose devices have not started a collective that the devices of a majority run."""
    receiving: Mapping[int, tuple[int, ...]]
    """Ranks that a rank waits for in point-to-point operations, by rank. Empty if the peer is unknown."""
    no_record: Mapping[int, NoRecord]
    """Ranks without a usable record, with those whose records are outdated."""


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
    """The steps of one rank in a group, while its entries are being read."""

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
                # A program that creates its groups again uses the same names. Only the latest group counts.
                draft = drafts[key] = _Draft(entry.group_id, entry.group_description, {})
            if entry.group_id == draft.group_id:
                draft.steps[entry.collective_seq_id] = reader.read(
                    entry, draft.steps.get(entry.collective_seq_id)
                )
    if record.has_raised:
        for draft in drafts.values():
            # torch marks a collective that has failed as retired, as it does one that has completed.
            last = max(draft.steps)
            draft.steps[last] = draft.steps[last]._replace(is_complete=False)
    return drafts


def _memberships(
    name: str, by_rank: Mapping[int, _Draft], ranks: Mapping[int, RankRecord], world: tuple[int, ...]
) -> list[tuple[tuple[int, ...], bool, list[int]]]:
    """Return the different groups of this name: the members, true if they are all known, and the ranks with
    entries. Several groups may have one name if they have no common rank.
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
    """Converts entries to steps. Most entries repeat the same call, so equal calls are shared."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, Sizes, tuple[str, ...]], Call] = {}

    def read(self, entry: Entry, earlier: Step | None) -> Step:
        """Convert an entry. ``earlier`` is the step of an entry of the same collective, because a coalesced
        collective has several.
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
    """Return the ranks whose records of this group are older than those of others (**COL-2**)."""
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

    If it has completed everywhere, it counts only if the calls of a later one do not match either. Otherwise
    the ranks may have used variants of an operation that this module does not know.
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
    """Return the most frequent name; of equally frequent ones, the first in alphabetical order."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return min(counts, key=lambda name: (-counts[name], name))


# --- point-to-point operations ---


def _receiving(ranks: Mapping[int, RankRecord], world: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Return the peers that ranks wait for in point-to-point operations that have not completed."""
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
