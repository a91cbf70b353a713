"""Matches the flight records of all ranks, to find collectives that are incomplete, or whose calls differ.

- **COL-1** A rank counts as absent from a collective only if its record contains a call in the group, or no
  entry of the record was overwritten.
- **COL-2** A record is outdated and not used if it lacks a collective that another rank has completed and
  that needs data from every rank.
- **COL-3** The result does not depend on the order of the ranks.

The members of a group come from the records (NCCL) or from the workers. The default group has all ranks. Of
any other group, only the ranks that have called one of its collectives are known.
"""

from __future__ import annotations

from typing import NamedTuple

from elasticrs._engine.hangs.flight_record import DEFAULT_GROUP, GroupSteps, NoRecord, RankRecord

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elasticrs._engine.hangs.flight_record import Call

_NEEDS_ALL_RANKS = frozenset(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))


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
    usual: Call | None = None
    """If calls differ: the call of groups of the same kind (such as tensor-parallel groups) in its place."""
    late: tuple[int, ...] = ()
    """Ranks whose devices have not started the collective, if most ranks' devices run it."""


class Group(NamedTuple):
    backend: str
    name: str
    description: str
    members: tuple[int, ...]
    are_members_known: bool
    tracks: Mapping[int, GroupSteps]
    """Calls of each member in this group, if its record covers the group (**COL-1**)."""


class Matched(NamedTuple):
    stuck: tuple[StuckCollective, ...]
    """Collectives that have not completed, and those whose calls do not match."""
    receiving: Mapping[int, tuple[int, ...]]
    """For each rank in a point-to-point operation: the peers that it waits for; empty if they are unknown."""
    no_record: Mapping[int, NoRecord]
    """Ranks without a usable record, including ranks whose records are outdated."""
    progress: Mapping[int, tuple[int, ...]] = {}
    """For each rank: the number of collectives that it has called in each kind of process group. A kind is
    included only if its groups together contain each rank once, as in a mesh. Empty if a rank has no usable
    record.
    """


def match(ranks: Mapping[int, RankRecord | NoRecord]) -> Matched:
    usable = {rank: record for rank, record in sorted(ranks.items()) if isinstance(record, RankRecord)}
    no_record = {rank: record for rank, record in sorted(ranks.items()) if isinstance(record, NoRecord)}
    world = tuple(sorted(ranks))
    groups = _groups(usable, world)
    outdated = {rank for group in groups for rank in _outdated(group, usable)}
    if outdated:
        usable = {rank: record for rank, record in usable.items() if rank not in outdated}
        no_record |= dict.fromkeys(outdated, NoRecord.OUTDATED)
        groups = _groups(usable, world)
    kinds = _kinds(groups)
    stuck = tuple(
        collective._replace(late=_not_started(group, collective), usual=_usual_call(group, collective, kinds))
        for group in groups
        for collective in _stuck(group)
    )
    progress = {} if no_record else _progress(kinds, world)
    return Matched(stuck, _receiving(usable, world), dict(sorted(no_record.items())), progress)


def _groups(ranks: Mapping[int, RankRecord], world: tuple[int, ...]) -> list[Group]:
    by_group: dict[tuple[str, str], dict[int, GroupSteps]] = {}
    for rank, record in ranks.items():
        for key, steps in record.groups.items():
            by_group.setdefault(key, {})[rank] = steps
    groups = []
    for (backend, name), by_rank in sorted(by_group.items()):
        for members, is_known, inside in _memberships(name, by_rank, ranks, world):
            tracks = {rank: by_rank[rank] for rank in inside}
            description = by_rank[inside[0]].description
            for rank in members:
                if rank in ranks and rank not in tracks and not ranks[rank].is_truncated:
                    tracks[rank] = GroupSteps(description, {})
            groups.append(Group(backend, name, description, members, is_known, tracks))
    return groups


def _memberships(
    name: str, by_rank: Mapping[int, GroupSteps], ranks: Mapping[int, RankRecord], world: tuple[int, ...]
) -> list[tuple[tuple[int, ...], bool, list[int]]]:
    """Return all process groups with this name. No rank is in two of them. Each item has three parts: the
    group's members, whether all members are known, and the ranks whose records contain the group.
    """
    known: dict[tuple[int, ...], list[int]] = {}
    unknown = []
    for rank in by_rank:
        members = ranks[rank].members.get(name, ())
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


def _kinds(groups: Iterable[Group]) -> dict[tuple[str, str], list[Group]]:
    kinds: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        kinds.setdefault((group.backend, group.description), []).append(group)
    return kinds


def _usual_call(
    group: Group, collective: StuckCollective, kinds: Mapping[tuple[str, str], Sequence[Group]]
) -> Call | None:
    """Return the call that other process groups of the same kind made at the place where the calls of this
    group's ranks differ. Only groups count whose earlier calls equal those of this group. Return ``None`` if
    there is no such group, if such groups made different calls, or if no rank of this group made their call.
    """
    if not collective.sides:
        return None
    before = {
        seq: step.call
        for track in group.tracks.values()
        for seq, step in track.steps.items()
        if seq < collective.seq
    }
    calls = set()
    for other in kinds[group.backend, group.description]:
        for track in () if other is group else other.tracks.values():
            common = before.keys() & track.steps.keys()
            is_alike = bool(common) and all(track.steps[seq].call == before[seq] for seq in common)
            if is_alike and collective.seq in track.steps:
                calls.add(track.steps[collective.seq].call)
    (usual,) = calls if len(calls) == 1 else (None,)
    return usual if any(side.call == usual for side in collective.sides) else None


def _progress(
    kinds: Mapping[tuple[str, str], Sequence[Group]], world: tuple[int, ...]
) -> dict[int, tuple[int, ...]]:
    counts = []
    for alike in kinds.values():
        ranks = [rank for group in alike for rank in group.tracks]
        if tuple(sorted(ranks)) == world:
            counts.append({rank: track.entered for group in alike for rank, track in group.tracks.items()})
    return {rank: tuple(entered[rank] for entered in counts) for rank in world}


def _outdated(group: Group, ranks: Mapping[int, RankRecord]) -> set[int]:
    """Return the group's ranks whose records are outdated, as the records of others show (**COL-2**)."""
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


def _mismatch(group: Group) -> dict[int, tuple[Side, ...]]:
    """Find the first collective in which the ranks' calls differ. Return its sequence number and these calls,
    or nothing if there is none. Ignore a difference if the collective has completed on all ranks and the
    calls of all later collectives match, because the ranks may then have called variants of one operation,
    which this module does not know.
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
            return {seq: tuple(sorted(sides, key=lambda side: (-len(side.ranks), side.ranks)))}
    return {}


def _stuck(group: Group) -> list[StuckCollective]:
    mismatch = _mismatch(group)
    waiting: dict[int, list[int]] = {seq: [] for seq in mismatch}
    for rank in sorted(group.tracks):
        waits_in = group.tracks[rank].waits_in
        if waits_in is not None:
            waiting.setdefault(waits_in, []).append(rank)
    return [
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
            mismatch.get(seq, ()),
        )
        for seq, ranks in sorted(waiting.items())
    ]


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
    """Return the most frequent name, or the alphabetically first of them."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return min(counts, key=lambda name: (-counts[name], name))


def _receiving(ranks: Mapping[int, RankRecord], world: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    receiving: dict[int, set[int]] = {}
    for rank, record in ranks.items():
        for transfer in record.transfers:
            peers = receiving.setdefault(rank, set())
            members = record.members.get(transfer.group, ())
            if not members and transfer.description == DEFAULT_GROUP:
                members = world
            if transfer.peer is not None and transfer.peer < len(members):
                peers.add(members[transfer.peer])
    return {rank: tuple(sorted(peers)) for rank, peers in sorted(receiving.items())}
