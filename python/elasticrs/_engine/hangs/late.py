"""Finds the slow ranks of a running job: they call collectives later than the other ranks of their node.

A slow rank calls each collective late. The ranks that wait for it are in the collective, so they are early.
The times are compared only between ranks of one node, because the clocks of nodes differ.

- **LATE-1** A rank is not late if its delay may come from another rank of the node. So a late rank takes part
  in no send or receive. In each of its other process groups that delays only some of the ranks with which the
  rank is compared, its total wait is the shortest of all members. If the calls of a member of such a group
  are unknown, for example because it runs on another node, ``may_wait`` is true. It is also true if the rank
  may have sends and receives that are unknown.
- **LATE-2** For any header, :func:`arrivals_of` returns values of the declared types, or ``None``.
- **LATE-3** The result does not depend on the order of the ranks.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from elasticrs._engine.hangs.flight_record import NAMES, number, of_type

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, TypeAlias

    Group: TypeAlias = tuple[str, str, tuple[int, ...]]
    """A process group: its backend, its name, and the global ranks of its members (empty if unknown)."""

LEAST_NS, FACTOR = 2_000_000, 3
"""A rank is late for a collective if it comes more than this number of nanoseconds after the first rank, and
if it comes more than this number of times as late as the median of the others.
"""

SHARE = 0.8
"""Part of the collectives for which a rank must be late. Two equal ranks are each late for half of them."""

FEWEST, SPAN_NS = 30, 1_000_000_000
"""Minimum number of independent delays of a rank, and minimum time from the first to the last in nanoseconds.
In less time, a single pause of a rank could make it late for all collectives.
"""


class Call(NamedTuple):
    operation: str
    at_ns: int
    """Time of the call on the node's wall clock."""


class Arrivals(NamedTuple):
    """Calls of one rank to collectives, by group and sequence number."""

    calls: Mapping[Group, Mapping[int, Call]]
    has_transfers: bool
    """True if the rank may have waited for a peer in a send or receive."""
    may_have_transfers: bool
    """True if the default group has no calls. It may have sends and receives, because gloo records none."""


class Late(NamedTuple):
    times: int
    """Number of collectives for which the rank was late."""
    of: int
    operation: str
    lag_ms: float
    """Median of the milliseconds by which the rank was later than the median of the others."""
    may_wait: bool
    """True if the rank may be late because of a wait in a call that is unknown."""


class Look(NamedTuple):
    """Result of a search for late ranks among a node's workers, by local rank."""

    at: float
    """Monotonic time of the search in seconds."""
    late: Mapping[int, Late]
    recorders: Mapping[int, bool]
    """For each worker that has answered and uses torch: false if torch's flight recorder is off."""


def arrivals_of(header: Mapping[str, Any]) -> Arrivals | None:
    """Return the times in the header of a rank's flight record; ``None`` if they are missing or invalid."""
    try:
        return _parsed(header["arrivals"], header["groups"])
    except (LookupError, ValueError, TypeError, AttributeError):
        return None  # The worker can write anything to the file.


def _parsed(rows: Sequence[Any], members: Mapping[str, Sequence[int]]) -> Arrivals:
    calls: dict[Group, dict[int, Call]] = {}
    transfers: dict[Group, set[int]] = {}
    has_transfers = False
    for name, profiled, seq, op_id, is_p2p, at_ns in rows:
        backend, _, operation = of_type(str, profiled).lower().partition(":")
        group = backend, of_type(str, name), tuple(sorted(map(number, members.get(name, ()))))
        if is_p2p:
            has_transfers = True
            continue
        calls.setdefault(group, {}).setdefault(
            number(seq), Call(NAMES.get(operation, operation), number(at_ns))
        )
        if backend == "gloo":
            # gloo does not record sends or receives, but includes them in its operation counts.
            transfers.setdefault(group, set()).add(number(op_id) - seq)
    has_transfers |= any(len(numbers) > 1 for numbers in transfers.values())
    unused: list[str] = []
    if transfers.keys() == calls.keys():
        # gloo does not record sends and receives. So if all recorded calls used gloo, assume that a group
        # without recorded calls is used for sends and receives. Exempt the default group: it always exists,
        # so it may simply be unused.
        called = {name for _, name, _ in calls}
        unused = [name for name, ranks in members.items() if len(ranks) > 1 and name not in called]
    default = next(iter(members), "")
    return Arrivals(calls, has_transfers or unused not in ([], [default]), default in unused)


def late_ranks(ranks: Mapping[int, Arrivals]) -> dict[int, Late]:
    """Return the late ranks among ``ranks``, which are all ranks of one node."""
    by_group: dict[Group, dict[int, Mapping[int, Call]]] = {}
    for rank in sorted(ranks):
        for group, calls in ranks[rank].calls.items():
            by_group.setdefault(group, {})[rank] = calls
    found: dict[int, Late] = {}
    for members in by_group.values():
        for rank, late in _late_in(members).items():
            others = [
                (each[2], theirs)
                for each, theirs in by_group.items()
                if rank in theirs and not members.keys() <= theirs.keys()
            ]
            is_own = not ranks[rank].has_transfers and all(
                _waits_least(rank, theirs, late.lag_ms * 1e6) for _, theirs in others
            )
            if is_own:
                may_wait = ranks[rank].may_have_transfers
                may_wait |= any(sorted(theirs) != list(known) for known, theirs in others)
                candidates = [late._replace(may_wait=may_wait), *filter(None, [found.get(rank)])]
                found[rank] = max(candidates, key=lambda each: (not each.may_wait, each.times))
    return found


def _late_in(members: Mapping[int, Mapping[int, Call]]) -> dict[int, Late]:
    """Return the ranks that are late for the collectives of one group."""
    rounds = _rounds(members)
    if len(members) < 2 or len(rounds) < FEWEST or _first(rounds[-1]) - _first(rounds[0]) < SPAN_NS:
        return {}
    times = dict.fromkeys(members, 0)
    behind: dict[int, list[int]] = {rank: [] for rank in members}
    for calls in rounds:
        first = _first(calls)
        lags = sorted(call.at_ns - first for call in calls.values())
        for rank, call in calls.items():
            lag, others = call.at_ns - first, lags.copy()
            others.remove(lag)
            usual = others[len(others) // 2]
            behind[rank].append(lag - usual)
            times[rank] += lag > max(LEAST_NS, FACTOR * usual)
    operations = {call.operation for calls in rounds for call in calls.values()}
    operation = operations.pop() if len(operations) == 1 else "collectives"
    return {
        rank: Late(times[rank], len(rounds), operation, median(behind[rank]) / 1e6, may_wait=False)
        for rank in members
        if times[rank] >= SHARE * len(rounds) and _independent(behind[rank]) >= FEWEST
    }


def _rounds(members: Mapping[int, Mapping[int, Call]]) -> list[dict[int, Call]]:
    """Return each rank's call to those collectives that all ranks called after all of them had called the one
    before. Other collectives follow so closely that one delay would make a rank late for both.
    """
    rounds = []
    before = None
    for seq in _common(members):
        calls = {rank: theirs[seq] for rank, theirs in members.items()}
        is_same = len({call.operation for call in calls.values()}) == 1
        if before is not None and is_same and _first(calls) >= before:
            rounds.append(calls)
        before = max(call.at_ns for call in calls.values())
    return rounds


def _independent(values: Sequence[float]) -> float:
    """Estimate how many of the values are independent (the effective sample size). Use von Neumann's ratio:
    the squared changes from each value to the next, divided by the variance. The result is small if each
    delay resembles the one before, as when a delay persists because no rank waits.
    """
    mean = fmean(values)
    variance = sum((value - mean) ** 2 for value in values)
    changes = sum((after - before) ** 2 for before, after in pairwise(values))
    return len(values) * min(1.0, changes / (2 * variance)) if variance else len(values)


def _common(members: Mapping[int, Mapping[int, Call]]) -> list[int]:
    return sorted(set.intersection(*map(set, members.values())))


def _first(calls: Mapping[int, Call]) -> int:
    return min(call.at_ns for call in calls.values())


def _waits_least(rank: int, members: Mapping[int, Mapping[int, Call]], most_ns: float) -> bool:
    """Return true if ``rank`` has the shortest total wait of all members in the collectives that they have in
    common. Count at most ``most_ns`` of each wait, so that one long wait, such as that at the start of the
    job, does not decide. Return false if there is no such collective.
    """
    waits = dict.fromkeys(members, 0.0)
    common = _common(members)
    for seq in common:
        last = max(calls[seq].at_ns for calls in members.values())
        for each, calls in members.items():
            waits[each] += min(last - calls[seq].at_ns, most_ns)
    return bool(common) and waits[rank] == min(waits.values())
