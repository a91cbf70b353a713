"""Finds the ranks that keep a hung job waiting, by comparing the flight records and stacks of all ranks.

Most ranks only wait in a collective, for the ranks that have not called it (absent ranks). An absent rank
that does not wait for any rank is a *root*. Blame falls only on roots, and on ranks whose calls do not match
those of a majority.

- **CUL-1** If the calls of the ranks differ, only a minority is blamed. If two sides are equally large, other
  groups that run the same program decide, such as the other tensor-parallel groups, or no rank is blamed.
- **CUL-2** A rank whose stack shows that it waits is blamed only if there is no better explanation, because
  gloo does not record point-to-point operations.
- **CUL-3** The result does not depend on the order of the ranks.
- **CUL-4** If no other rule finds the culprit, compare the numbers of collectives in each kind of group.
  Ranks that run the same program can be sorted by these numbers, because a rank that is ahead in one kind is
  not behind in another. If only one rank contradicts this order, this rank has skipped, reordered or added a
  collective.
- **CUL-5** A rank that gloo has aborted expected less data than another rank sent, so it counts as a rank
  that called the collective with the smaller size. Only calls that do not match can explain such an abort.
  Absent ranks and missing records cannot.

:func:`decide` and :func:`decide_failure` combine the records with the heartbeats. All messages to the user
show the decision of these functions.

- **BLAME-1** If the flight records are conclusive, they determine the ranks to blame.
- **BLAME-2** Otherwise, ranks are only named as candidates. A rank that was stopped by a signal (SIGSTOP) is
  blamed nevertheless, because the state of its process is proof.
- **BLAME-3** Heartbeats decide only without flight records, or if no rank waits according to the records.
- **BLAME-4** If native code has aborted a rank inside a collective, only conclusive records can blame it,
  because gloo aborts the rank that expects less data, and that rank may be innocent.
- **BLAME-5** If some ranks, at most half, have exited with code 0 before a hang, and neither records nor the
  state of a process decide, no rank is blamed. The ranks that have exited are candidates.
- **BLAME-6** A small difference between the times of the last heartbeats is no evidence.
"""

from __future__ import annotations

import itertools
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from elasticrs._engine.hangs.flight_record import NoRecord
from elasticrs._engine.hangs.stacks import is_library, waits_for_ranks
from elasticrs._engine.job.phrases import ranks_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from elasticrs._engine.hangs.collectives import Matched, StuckCollective
    from elasticrs._engine.hangs.flight_record import Call
    from elasticrs._engine.hangs.stacks import Frame, MergedStack

_STOPPED = "stopped"
_MAX_PROGRESSES = 256
"""Maximum number of different values in ``Matched.progress``, because each pair of values is compared."""


class Reason(str, Enum):
    DID_NOT_ENTER = "did_not_enter"
    """Other ranks wait in a collective that these ranks have not called."""
    OTHER_CALL = "other_call"
    """These ranks called another operation, or passed another number or type of elements."""
    NOT_STARTED = "not_started"
    """Most ranks' devices run a collective that these ranks' devices have not started."""
    NO_RECORD = "no_record"
    """Some of these ranks may be absent from a collective, but none of them has a record."""
    OTHER_ORDER = "other_order"
    """These ranks wait for ranks that wait for them in another group: a skipped call, or another order."""
    NO_PEER = "no_peer"
    """Other ranks wait for these ranks in a point-to-point operation that these ranks have not called."""
    OUTSIDE = "outside"


class Confidence(str, Enum):
    CERTAIN = "certain"
    """The records of all ranks of the group confirm the choice."""
    LIKELY = "likely"
    """Some evidence is missing, or there are two explanations and the one with more ranks was chosen."""
    POSSIBLE = "possible"


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


class Diagnosis(NamedTuple):
    """Explanation of a hang or a failed collective, from the flight records and stacks of all ranks."""

    summary: str
    culprits: tuple[Culprit, ...]
    """Ranks to blame, highest confidence first. Empty if the evidence points to no rank."""
    candidates: tuple[int, ...]
    """Ranks that may be to blame. Empty if a culprit is likely or certain, or if no rank waits."""
    collectives: tuple[StuckCollective, ...]
    """Collectives that have not completed. Those that explain the hang come first."""
    no_record: Mapping[int, NoRecord]
    """Why there is no usable record of a rank."""
    stacks: tuple[MergedStack, ...]
    """Distinct stacks, the most frequent first."""

    def blamed(self) -> set[int]:
        """Return the ranks to blame, except those that are only possible culprits."""
        sure = (culprit for culprit in self.culprits if culprit.confidence is not Confidence.POSSIBLE)
        return {rank for culprit in sure for rank in culprit.ranks}


class Basis(str, Enum):
    RECORDS = "records"
    EXIT = "exit"
    """Ranks exited with code 0 while other ranks were still waiting for them. If the blame is not decided,
    other ranks hung later, perhaps for another reason.
    """
    HEARTBEATS = "heartbeats"
    """Times and steps of the last heartbeats."""


class Blame(NamedTuple):
    """Ranks to blame for a hang, or, if the evidence is not conclusive, the candidates."""

    ranks: tuple[int, ...]
    is_decided: bool
    """False if the evidence does not show which ranks are to blame, so that they are only candidates."""
    basis: Basis

    @property
    def text(self) -> str:
        """Names of the ranks, such as ``ranks 1, 2`` or ``undecided, candidates: ranks 0, 1``."""
        ranks = ranks_text(self.ranks)
        return ranks if self.is_decided else f"undecided, candidates: {ranks}"


def decided(diagnosis: Diagnosis | None) -> Blame | None:
    """Return the ranks that the flight records blame; ``None`` if the records are not conclusive."""
    blamed = () if diagnosis is None else tuple(sorted(diagnosis.blamed()))
    return Blame(blamed, True, Basis.RECORDS) if blamed else None


def decide(
    diagnosis: Diagnosis | None,
    rank: int,
    ground: str,
    *,
    suspects: Sequence[int] | None = None,
    left: Sequence[int] = (),
) -> Blame:
    """Decide which ranks to blame for a hang. The heartbeats suggest ``rank``; ``ground`` is their reason.
    ``suspects`` are all ranks that the heartbeats leave as candidates, by default only ``rank``. ``left`` are
    the ranks that exited with code 0 before the hang, if the others may wait for them.
    """
    found = decided(diagnosis)
    if found is not None:
        return found
    candidates = () if diagnosis is None else diagnosis.candidates
    if ground != _STOPPED and candidates and candidates != (rank,):
        return Blame(candidates, False, Basis.RECORDS)
    if ground != _STOPPED and not candidates and left:
        return Blame(tuple(sorted({*left, *((rank,) if suspects is None else suspects)})), False, Basis.EXIT)
    if ground != _STOPPED and not candidates and suspects is not None and len(suspects) > 1:
        return Blame(tuple(sorted(suspects)), False, Basis.HEARTBEATS)
    return Blame((rank,), True, Basis.HEARTBEATS)


def decide_failure(
    diagnosis: Diagnosis | None, rank: int, ranks: Sequence[int], *, may_be_innocent: bool = False
) -> Blame | None:
    """Decide which ranks are to blame for a failed collective, if ``rank`` failed first.
    ``may_be_innocent`` is true if native code has aborted this rank, perhaps in a collective. Return ``None``
    if no evidence speaks against blaming the rank.
    """
    found = decided(diagnosis)
    if found is not None:
        return found
    suspects = () if diagnosis is None else diagnosis.candidates
    if suspects and diagnosis is not None and diagnosis.no_record.get(rank) is NoRecord.ABORTED:
        candidates = sorted({rank, *suspects})
    elif not suspects and may_be_innocent:
        candidates = sorted({rank, *ranks})
    else:
        return None
    return Blame(tuple(candidates), len(candidates) == 1, Basis.RECORDS)


def blame(
    matched: Matched, stacks: Mapping[int, Sequence[Frame]], ranks: Sequence[int]
) -> tuple[tuple[Culprit, ...], tuple[int, ...]]:
    """Find the ranks to blame. Return two tuples: the culprits, highest confidence first, with each rank only
    once, and the candidates (ranks that may be to blame), which are empty if a culprit is likely or certain.
    Each of the ``stacks`` begins with the innermost frame.
    """
    search = _Search(matched, stacks, ranks)
    culprits = search.culprits()
    is_known = any(culprit.confidence is not Confidence.POSSIBLE for culprit in culprits)
    return culprits, () if is_known else search.suspects(culprits)


def out_of_line(progress: Mapping[int, Sequence[int]]) -> int | None:
    """Return the only rank that does not fit into the ranks' order by progress (**CUL-4**), or ``None``."""
    by_progress: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(progress):
        by_progress.setdefault(tuple(progress[rank]), []).append(rank)
    if len(by_progress) > _MAX_PROGRESSES:
        return None
    pairs = [
        (one, other)
        for one, other in itertools.combinations(sorted(by_progress), 2)
        if any(mine > its for mine, its in zip(one, other, strict=True))
    ]
    if not pairs:
        return None
    everywhere = set(pairs[0]).intersection(*map(set, pairs))
    # Ignore a position (the number of collectives called in each group) that several ranks share: rarely do
    # several ranks fall behind in the same way.
    alone = [by_progress[each][0] for each in everywhere if len(by_progress[each]) == 1]
    return alone[0] if len(alone) == 1 else None


def shows_waiting(frames: Sequence[Frame] | None) -> bool | None:
    """Return true if a rank with this stack waits for other ranks, false if not, and ``None`` if unknown."""
    if not frames:
        return None
    if waits_for_ranks(frames):
        return True
    return False if is_library(frames[0]) else None


class _Ends(NamedTuple):
    has_root: bool
    has_unknown: bool
    """True if the root may be a rank without a record, or an unknown member of a group."""


class _Search:
    def __init__(self, matched: Matched, stacks: Mapping[int, Sequence[Frame]], ranks: Sequence[int]) -> None:
        self._matched, self._stacks, self._ranks = matched, stacks, sorted(ranks)
        self._shown = {rank: shows_waiting(stacks.get(rank)) for rank in ranks}
        self._aborted = {rank for rank, why in matched.no_record.items() if why is NoRecord.ABORTED}
        self._waits: dict[int, list[int]] = {}
        """Indexes of the collectives in which each rank waits."""
        for index, stuck in enumerate(matched.stuck):
            for rank in stuck.waiting:
                self._waits.setdefault(rank, []).append(index)

    def culprits(self) -> tuple[Culprit, ...]:
        others = self._aborted_ones() if self._aborted else self._others()
        found = _distinct([*self._with_other_calls(), *others])
        if not self._aborted and all(culprit.confidence is Confidence.POSSIBLE for culprit in found):
            found = _distinct([*found, *self._out_of_line()])
        confidences = list(Confidence)
        found.sort(key=lambda culprit: (confidences.index(culprit.confidence), -_weight(culprit)))
        return tuple(found)

    def _others(self) -> Iterator[Culprit]:
        yield from self._roots()
        yield from self._peers()
        yield from self._not_started()
        ends = [(stuck, self._ends_of(index)) for index, stuck in enumerate(self._matched.stuck)]
        unexplained = [stuck for stuck, end in ends if stuck.waiting and not end.has_root]
        yield from self._in_other_order([index for index, (_, end) in enumerate(ends) if not any(end)])
        yield from self._without_record(unexplained)
        yield from self._outside(unexplained)

    def _with_other_calls(self) -> Iterator[Culprit]:
        for stuck in self._matched.stuck:
            if not stuck.sides:
                continue
            votes = self._votes(stuck)
            majority = max(stuck.sides, key=lambda side: votes[side.call])
            is_most = 2 * votes[majority.call] > sum(votes.values())
            expected = majority.call if is_most else stuck.usual
            if expected is None:
                continue  # CUL-1
            is_certain = stuck.are_members_known and 2 * len(majority.ranks) > len(stuck.members)
            confidence = Confidence.CERTAIN if is_certain else Confidence.LIKELY
            for side in stuck.sides:
                if side.call != expected:
                    yield Culprit(side.ranks, Reason.OTHER_CALL, confidence, stuck, side.call, expected)

    def _votes(self, stuck: StuckCollective) -> dict[Call, int]:
        """Count the ranks that made each call to a collective. If the calls differ only in size, count the
        ranks that gloo aborted for the smallest: gloo aborts a rank that receives too much (**CUL-5**).
        """
        votes = {side.call: len(side.ranks) for side in stuck.sides}
        sizes = {call.elements for call in votes}
        is_by_size = len({(call.operation, call.dtypes) for call in votes}) == 1 and None not in sizes
        if is_by_size:
            votes[min(votes, key=lambda call: call.elements or 0)] += len(self._aborted_in(stuck))  # CUL-5
        return votes

    def _aborted_in(self, stuck: StuckCollective) -> set[int]:
        return self._aborted.intersection(stuck.unknown)

    def _aborted_ones(self) -> Iterator[Culprit]:
        """Yield the ranks that gloo aborted because they called another collective (**CUL-5**).

        The confidence is "likely" if the records of all other ranks are known, and if, for each collective in
        which the abort may have happened, more ranks than the aborted ones called it, all with the same call.
        All of these collectives must belong to one group. If they belonged to several groups, the abort could
        have happened in a group without such a majority.
        """
        stuck_in = [stuck for stuck in self._matched.stuck if stuck.waiting and self._aborted_in(stuck)]
        groups = {(stuck.group, stuck.members) for stuck in stuck_in}
        is_odd = len(groups) == 1 and all(map(self._others_agree, stuck_in))
        for stuck in sorted(stuck_in, key=lambda stuck: -len(stuck.waiting)):
            if not stuck.sides:
                confidence = Confidence.LIKELY if is_odd else Confidence.POSSIBLE
                aborted = tuple(sorted(self._aborted_in(stuck)))
                yield Culprit(aborted, Reason.NO_RECORD, confidence, stuck)

    def _others_agree(self, stuck: StuckCollective) -> bool:
        """Return true if all ranks that called this collective made the same call, and are more than those
        that gloo aborted. Return false if the record of any rank that was not aborted is unknown.
        """
        aborted = len(self._aborted_in(stuck))
        called = len(stuck.members) - len(stuck.absent) - len(stuck.unknown)
        return not stuck.sides and len(self._matched.no_record) == aborted and called > aborted

    def _is_free(self, rank: int) -> bool:
        return rank not in self._waits and rank not in self._matched.receiving

    def _idle(self, ranks: Iterable[int]) -> list[int]:
        free = [rank for rank in ranks if self._is_free(rank) and rank not in self._matched.no_record]
        return [rank for rank in free if self._shown.get(rank) is not True]

    def _free_absent(self, stuck: StuckCollective) -> list[int]:
        """Return absent ranks that do not wait by their records. Prefer those whose stacks agree (CUL-2)."""
        free = [rank for rank in stuck.absent if self._is_free(rank)]
        others = [rank for rank in free if self._shown.get(rank) is not True]
        return others or free

    def _roots(self) -> Iterator[Culprit]:
        for stuck in sorted(self._matched.stuck, key=lambda stuck: -len(stuck.waiting)):
            free = self._free_absent(stuck) if stuck.waiting and not stuck.sides else []
            if not free or 2 * len(free) > len(stuck.members):
                continue  # CUL-1
            by_confidence: dict[Confidence, list[int]] = {}
            for rank in free:
                by_confidence.setdefault(self._confidence(rank, stuck), []).append(rank)
            for confidence, ranks in by_confidence.items():
                yield Culprit(tuple(ranks), Reason.DID_NOT_ENTER, confidence, stuck)

    def _confidence(self, rank: int, stuck: StuckCollective) -> Confidence:
        waits = self._shown.get(rank)
        if waits:
            return Confidence.POSSIBLE
        hides_waiting = stuck.backend == "gloo" and waits is None
        is_complete = stuck.are_members_known and not stuck.unknown
        return Confidence.CERTAIN if is_complete and not hides_waiting else Confidence.LIKELY

    def _peers(self) -> Iterator[Culprit]:
        """Yield the ranks that other ranks wait for in a send or receive. Leave out ranks that wait, too."""
        peers = {peer for found in self._matched.receiving.values() for peer in found}
        free = self._idle(sorted(peers))
        if free and 2 * len(free) <= len(self._ranks):
            yield Culprit(tuple(free), Reason.NO_PEER, Confidence.LIKELY, None)

    def _not_started(self) -> Iterator[Culprit]:
        for stuck in self._matched.stuck:
            if stuck.late:
                yield Culprit(stuck.late, Reason.NOT_STARTED, Confidence.LIKELY, stuck)

    def _ends_of(self, start: int) -> _Ends:
        """Follow, from the collective ``start``, its absent ranks to the collectives in which these wait,
        and so on. Return whether a cause (root) was found, and whether missing evidence may hide one.
        """
        reached, pending = {start}, [start]
        has_root = has_unknown = False
        while pending and not has_root:
            stuck = self._matched.stuck[pending.pop()]
            absent = stuck.absent
            # No rank is to blame for a collective that all ranks have called.
            is_full = not absent and not stuck.unknown and stuck.are_members_known
            has_root = (
                is_full
                or bool(stuck.sides)
                or any(self._is_free(rank) or rank in self._matched.receiving for rank in absent)
            )
            has_unknown = has_unknown or bool(stuck.unknown) or not stuck.are_members_known
            ahead = {index for rank in absent for index in self._waits.get(rank, ())} - reached
            reached |= ahead
            pending += ahead
        return _Ends(has_root, has_unknown)

    def _in_other_order(self, circles: Sequence[int]) -> Iterator[Culprit]:
        """Yield the only rank that is part of every cycle of waiting ranks, if there is one.

        Ranks that call the groups in the same order cannot wait for each other in a circle. So if a single
        rank has called them in another order, every circle contains this rank.
        """
        ahead: dict[int, dict[int, set[int]]] = {index: {} for index in circles}
        for index in circles:
            for rank in self._matched.stuck[index].absent:
                for further in self._waits.get(rank, ()):
                    ahead[index].setdefault(further, set()).add(rank)
        circle = _circle(ahead)
        on_circle = [ahead[index][further] for index, further in itertools.pairwise([*circle, *circle[:1]])]
        candidates = {rank for ranks in on_circle if len(ranks) == 1 for rank in ranks}
        breaking = [rank for rank in candidates if not _circle(ahead, without=rank)]
        if len(breaking) == 1:
            stuck = [self._matched.stuck[index] for index in circles]
            missed = max(
                (collective for collective in stuck if breaking[0] in collective.absent),
                key=lambda collective: len(collective.waiting),
            )
            yield Culprit(tuple(breaking), Reason.OTHER_ORDER, Confidence.LIKELY, missed)

    def _out_of_line(self) -> Iterator[Culprit]:
        waiting = [stuck for stuck in self._matched.stuck if stuck.waiting or stuck.sides]
        rank = out_of_line(self._matched.progress) if waiting else None
        if rank is not None:
            missed = max(waiting, key=lambda stuck: (rank in stuck.absent, len(stuck.waiting)))
            yield Culprit((rank,), Reason.OTHER_ORDER, Confidence.LIKELY, missed)

    def suspects(self, culprits: Iterable[Culprit]) -> tuple[int, ...]:
        """Return the ranks that may be to blame for a hang without a likely or certain culprit."""
        found = {rank for culprit in culprits for rank in culprit.ranks}
        stuck = self._matched.stuck
        missing = {rank for each in stuck if each.waiting for rank in (*each.absent, *each.unknown)}
        missing = {rank for rank in missing if self._matched.no_record.get(rank) is not NoRecord.LOST_PEER}
        free = {rank for rank in missing if self._is_free(rank)}
        for each in stuck:
            found.update(rank for side in each.sides for rank in side.ranks)
            if 2 * len(free.intersection(each.absent)) > len(each.members):
                found.update(each.waiting)  # CUL-1
            if self._aborted_in(each) or not (each.sides or each.absent or each.unknown):
                found.update(each.members)
        if self._aborted and found:
            found.update(self._matched.no_record)  # CUL-5
        return tuple(sorted(found | (free or missing)))

    def _without_record(self, unexplained: Sequence[StuckCollective]) -> Iterator[Culprit]:
        for stuck in unexplained:
            missing = stuck.unknown
            if not stuck.are_members_known:
                missing = tuple(self._matched.no_record)
            suspects = tuple(rank for rank in missing if not self._has_waited(rank))
            if not suspects or stuck.absent or 2 * len(suspects) > len(self._ranks):
                continue
            yield Culprit(suspects, Reason.NO_RECORD, self._confidence_without(suspects), stuck)

    def _has_waited(self, rank: int) -> bool:
        return bool(self._shown.get(rank)) or self._matched.no_record.get(rank) is NoRecord.LOST_PEER

    def _confidence_without(self, suspects: Sequence[int]) -> Confidence:
        reasons = {self._matched.no_record.get(rank) for rank in suspects}
        if reasons <= {NoRecord.EXITED, NoRecord.RETURNED}:
            return Confidence.CERTAIN
        is_weak = not reasons.isdisjoint((NoRecord.OUTDATED, NoRecord.OFF, NoRecord.NO_TORCH, None))
        is_outside = all(self._shown.get(rank) is False for rank in suspects)
        return (
            Confidence.LIKELY if is_outside or (len(suspects) == 1 and not is_weak) else Confidence.POSSIBLE
        )

    def _outside(self, unexplained: Sequence[StuckCollective]) -> Iterator[Culprit]:
        """Yield the ranks that are not in any collective. The ranks in collectives may wait for them."""
        if not self._matched.stuck:
            yield from self._outside_by_stacks()
        for stuck in unexplained:
            if stuck.are_members_known or stuck.absent:
                continue
            free = self._idle(self._ranks)
            if free and 2 * len(free) <= len(self._ranks):
                is_shown = all(self._shown.get(rank) is False for rank in free)
                confidence = Confidence.LIKELY if is_shown else Confidence.POSSIBLE
                yield Culprit(tuple(free), Reason.OUTSIDE, confidence, stuck)

    def _outside_by_stacks(self) -> Iterator[Culprit]:
        waiting = [rank for rank in self._ranks if self._shown.get(rank)]
        outside = tuple(rank for rank in self._ranks if not self._shown.get(rank) and self._stacks.get(rank))
        if outside and 2 * len(waiting) > len(self._ranks):
            is_shown = len(waiting) + len(outside) == len(self._ranks)
            confidence = Confidence.LIKELY if is_shown else Confidence.POSSIBLE
            yield Culprit(outside, Reason.OUTSIDE, confidence, None)


def _distinct(culprits: Iterable[Culprit]) -> list[Culprit]:
    """Return the culprits, with each rank only in the first that names it. Leave out empty culprits."""
    found: list[Culprit] = []
    named: set[int] = set()
    for culprit in culprits:
        ranks = tuple(rank for rank in culprit.ranks if rank not in named)
        if ranks:
            found.append(culprit._replace(ranks=ranks))
            named.update(ranks)
    return found


def _circle(ahead: Mapping[int, Mapping[int, set[int]]], without: int | None = None) -> list[int]:
    """Return a circle of collectives in which each waits for the next, and the last for the first; empty if
    there is none. A collective waits for another if ranks that have not called the first wait in the other.
    ``ahead`` maps each collective to those that it waits for, and each of these to such ranks. Ignore a wait
    if ``without`` is the only such rank.
    """
    waits_for = {
        index: [further for further, ranks in found.items() if ranks != {without}]
        for index, found in ahead.items()
    }
    try:
        TopologicalSorter(waits_for).prepare()
    except CycleError as error:
        # The exception lists each collective before the one that waits for it, and repeats the first one.
        circle: list[int] = error.args[1][:0:-1]
        return circle
    return []


def _weight(culprit: Culprit) -> int:
    return len(culprit.collective.waiting) if culprit.collective else 0
