"""The rule by which ranks copy their state into slots, explored over all states that a job can reach.

The model is that of sharded state: a step can be restored only if every rank has it in a slot.
"""

from collections import deque
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrs._engine.inside.keep import layout
from elasticrs._engine.inside.keep.choice import NEAR, Choice, Holding, KeptSlot, choose
from elasticrs._engine.inside.keep.layout import Mode
from elasticrs._engine.inside.keep.schedule import Held, can_spare, slots_to_use


class Rank(NamedTuple):
    """A rank between two events."""

    ended: int
    """The last step that has ended."""
    is_waiting: bool
    """True if the rank has contributed its gradients to the next step, and waits for the other ranks."""
    slots: tuple[int | None, ...]
    """Step in each slot; ``None`` if the slot is empty or being written."""
    copying: tuple[int, int] | None
    """Slot and step of a copy in progress. The rank's next optimizer step waits for its end."""

    def copied(self):
        """Return this rank after its copy in progress is complete."""
        if self.copying is None:
            return self
        slot, step = self.copying
        return self._replace(slots=replaced(self.slots, slot, step), copying=None)


def replaced(slots, slot, step):
    return (*slots[:slot], step, *slots[slot + 1 :])


def next_slot(slots):
    """Return the slot for the next copy: an empty one, or the one with the oldest step."""
    return min(range(len(slots)), key=lambda slot: (slots[slot] is not None, slots[slot] or 0))


def common_steps(ranks):
    return set.intersection(*(set(rank.slots) - {None} for rank in ranks))


def successors(ranks, every):
    """Yield the states that one event of one rank can lead to."""
    for number, rank in enumerate(ranks):
        after = []
        if rank.copying:
            after.append(rank.copied())
        if not rank.is_waiting:
            after.append(rank._replace(is_waiting=True))
        elif not rank.copying and all(
            (other.ended, other.is_waiting) >= (rank.ended, True) for other in ranks
        ):
            after.append(with_step_ended(rank, every))
        yield from ((*ranks[:number], each, *ranks[number + 1 :]) for each in after)


def with_step_ended(rank, every):
    step = rank.ended + 1
    if step % every:
        return Rank(step, False, rank.slots, None)
    slot = next_slot(rank.slots)
    return Rank(step, False, replaced(rank.slots, slot, None), (slot, step))


def restarted(ranks, step):
    """Return the state after a restart from ``step``. Slots of later steps belong to the attempt that was
    abandoned, and count as empty.
    """
    slots = [
        tuple(held if held is not None and held <= step else None for held in rank.slots) for rank in ranks
    ]
    return tuple(Rank(step, False, each, None) for each in slots)


def careless(newest, rank, others):
    return True


def inferring(newest, rank, others):
    """Return true if all ranks have completed their copies of a step, because their optimizers waited."""
    return rank.ended >= newest + 2


def looking(newest, rank, others):
    """Return true if all ranks are seen to have a step."""
    return all(newest in other.slots for other in others)


def kept_at_death(rank, others, may_copy):
    """Return the slots of a survivor after its copy at death. It makes the copy only if ``may_copy`` is true
    for the step in its newest slot.
    """
    slots = rank.copied().slots
    newest = max(step for step in slots if step is not None)
    if rank.ended == newest or not may_copy(newest, rank, others):
        return slots
    return replaced(slots, next_slot(slots), rank.ended)


def others_of(ranks, number):
    return (*ranks[:number], *ranks[number + 1 :])


def deaths(ranks, may_copy):
    """Yield the states after the death of each rank and the copies of all others."""
    for dead in range(len(ranks)):
        yield tuple(
            rank._replace(
                slots=rank.slots
                if number == dead
                else kept_at_death(rank, others_of(ranks, number), may_copy),
                copying=None,
            )
            for number, rank in enumerate(ranks)
        )


def shifted(ranks, every):
    """Return the same state with smaller step numbers, so that the number of different states is finite."""
    oldest = min(step for rank in ranks for step in (rank.ended, *rank.slots) if step is not None)
    by = oldest // every * every
    return tuple(
        Rank(
            rank.ended - by,
            rank.is_waiting,
            tuple(None if step is None else step - by for step in rank.slots),
            rank.copying and (rank.copying[0], rank.copying[1] - by),
        )
        for rank in ranks
    )


def reachable(count, slots, every):
    """Return all states that ``count`` ranks can reach, with restarts at any moment."""
    start = (Rank(0, False, (0, *[None] * (slots - 1)), None),) * count
    seen, new = {start}, deque([start])
    while new:
        ranks = new.popleft()
        after = list(successors(ranks, every))
        if common := common_steps(ranks):
            after.append(restarted(ranks, max(common)))
        for each in (shifted(each, every) for each in after):
            if each not in seen:
                seen.add(each)
                new.append(each)
    return seen


def lost(ranks, after):
    """Return the number of steps that are lost if the job goes on from ``after``, or infinity."""
    return max(rank.ended for rank in ranks) - max(common_steps(after), default=-float("inf"))


@pytest.mark.parametrize(("count", "every"), [(2, 2), (2, 3), (2, 5), (3, 2), (3, 3), (4, 2)])
def test_with_two_slots_a_common_step_exists_in_every_state(count, every):
    states = reachable(count, 2, every)
    assert len(states) > 100
    assert max(lost(ranks, ranks) for ranks in states) == every + 1
    for may_copy in (inferring, looking):
        copied = [lost(ranks, after) for ranks in states for after in deaths(ranks, may_copy)]
        assert max(copied) == every + 1


def test_nothing_is_lost_if_all_ranks_live_and_can_look_at_the_copies():
    for ranks in reachable(3, 2, 3):
        done = tuple(rank.copied() for rank in ranks)
        if len({rank.ended for rank in done}) == 1:
            kept = [
                rank._replace(slots=kept_at_death(rank, others_of(done, number), looking))
                for number, rank in enumerate(done)
            ]
            assert lost(done, kept) == 0


@pytest.mark.parametrize(
    ("slots", "every", "is_enough"), [(1, 1, False), (1, 3, False), (2, 1, False), (3, 1, True)]
)
def test_one_slot_never_suffices_and_two_do_not_for_copies_of_every_step(slots, every, is_enough):
    assert all(common_steps(ranks) for ranks in reachable(2, slots, every)) is is_enough


def test_a_careless_copy_at_death_can_destroy_the_last_common_step():
    """Show why a rank of a sharded job may not copy at death one step after its last copy: another rank that
    has died in that copy has only the step before.
    """
    states = reachable(2, 2, 3)
    assert any(lost(ranks, after) == float("inf") for ranks in states for after in deaths(ranks, careless))


class Job:
    """Model of ranks of one node that copy their states by the rules of the program. They die at any moment,
    also in copies, and restart. Between two exchanges of gradients, ranks end up to ``apart`` steps alone.
    """

    def __init__(self, count, every, apart, mode, random):
        self.ranks, self.every, self.apart, self.mode, self.random = range(count), every, apart, mode, random
        self.slots = [[None, None] for _ in self.ranks]
        self.small = [{} for _ in self.ranks]
        self.sequence, self.attempt = 0, -1
        self.is_whole = False
        """True once all ranks have had a copy of one step, or have restored one exactly."""
        self.restart(Choice())

    def restart(self, chosen):
        self.attempt, self.begun, self.older = self.attempt + 1, chosen.step, chosen.fallback
        for rank in self.ranks:
            for at, slot in enumerate(self.slots[rank]):
                if slot is not None and (self.begun is None or slot.step > self.begun):
                    self.slots[rank][at] = None
        self.has_joined, self.restored = ([None] * len(self.ranks) for _ in range(2))
        self.ended = self.sent = [None] * len(self.ranks)
        self.ended, self.sent = [*self.ended], [*self.sent]
        self.alive, self.given_up = {*self.ranks}, [-1] * len(self.ranks)
        self.copies = [None] * len(self.ranks)
        self.is_dying = False

    def put(self, rank, step, is_end):
        self.small[rank][layout.record_number(step, is_end)] = step

    def join(self, rank):
        begun = 0 if self.begun is None else self.begun
        self.has_joined[rank], self.ended[rank], self.sent[rank] = True, begun, begun
        after = -1 if self.begun is None else begun
        self.small[rank] = {number: step for number, step in self.small[rank].items() if step <= after}
        self.put(rank, begun, True)
        if self.begun is not None:
            self.small[rank][layout.RESTORED] = begun
            self.restored[rank] = begun
            self.is_whole |= None not in self.restored

    def steps(self, rank):
        return {slot.step for slot in self.slots[rank] if slot is not None}

    def held(self):
        restored = [-1 if step is None else step for step in self.restored]
        return [*map(Held, map(self.steps, self.ranks), self.given_up, restored)]

    def send(self, rank):
        self.sent[rank] += 1
        self.put(rank, self.sent[rank], False)

    def end_step(self, rank):
        self.ended[rank] = step = self.sent[rank]
        self.put(rank, step, True)
        if step % self.every == 0:
            self.small[rank][layout.COPIED] = step
            self.copies[rank] = self.copy(rank, is_at_death=False)

    def copy(self, rank, *, is_at_death):
        """Copy the state of a rank, in steps between which anything may happen."""
        step = self.ended[rank]
        has_copied = step in self.steps(rank)
        if has_copied or step == (self.begun or 0) or (self.begun is not None and None in self.restored):
            return
        is_replicated = self.mode == Mode.REPLICATED
        is_young = is_replicated and self.begun is not None and step < self.begun + NEAR
        slots = self.slots[rank]
        held = [None if slot is None else slot.step for slot in slots]
        order = slots_to_use(held, self.older if is_young else None)
        for number in order[: 1 if is_at_death and not is_replicated else None]:
            if held[number] is not None:
                self.given_up[rank] = held[number]
                yield
                if not can_spare(held[number], self.held(), is_replicated=is_replicated):
                    self.given_up[rank] = -1
                    yield
                    continue
                yield
            slots[number] = None
            yield
            if is_at_death or self.random.random() < 0.9:
                self.sequence += 1
                slots[number] = KeptSlot(number, step, self.attempt, 0, step, self.sequence)
            return

    def go_on(self, rank):
        if next(self.copies[rank], self) is self:
            self.copies[rank] = None

    def keep_at_death(self, rank):
        self.copies[rank] = self.copy(rank, is_at_death=True)
        self.has_kept.add(rank)

    def actions(self):
        for rank in sorted(self.alive):
            if self.copies[rank] is not None:
                yield self.go_on, rank
                if self.is_dying:
                    continue
            if self.is_dying:
                if self.has_joined[rank] and rank not in self.has_kept:
                    yield self.keep_at_death, rank
            elif not self.has_joined[rank]:
                yield self.join, rank
            elif self.sent[rank] == self.ended[rank]:
                yield self.send, rank
            elif self.copies[rank] is None and self.has_exchanged(self.sent[rank]):
                yield self.end_step, rank

    def has_exchanged(self, step):
        """Return true if a step can end, because the ranks have got as far as they must for that."""
        return step % self.apart or all((sent or 0) >= step for sent in self.sent)

    def run(self, events, death):
        """Let events happen, and kill some ranks at the end, also while the others copy their states."""
        self.has_kept = set()
        for _ in range(events):
            act, rank = self.random.choice([*self.actions()])
            act(rank)
            self.is_whole |= bool(set.intersection(*map(self.steps, self.ranks)))
            assert self.is_exact() or not self.is_whole
        self.is_dying = True
        self.alive.remove(self.random.choice(self.ranks))
        while actions := [*self.actions()]:
            act, rank = self.random.choice(actions)
            act(rank)
            if self.random.random() < death:
                self.alive.discard(rank)
            assert self.is_exact() or not self.is_whole

    def chosen(self):
        return choose(
            {
                rank: Holding(
                    tuple(slot for slot in self.slots[rank] if slot is not None),
                    frozenset(self.small[rank].values()),
                    has_joined=bool(self.has_joined[rank]),
                    attempt=self.attempt,
                    ended=self.ended[rank] if self.ended[rank] != self.begun else None,
                    mode=self.mode,
                    restored=self.restored[rank],
                )
                for rank in self.ranks
            },
            len(self.ranks),
            was_replicated=self.mode == Mode.REPLICATED,
        )

    def is_exact(self):
        chosen = self.chosen()
        return chosen.step is not None and chosen.is_exact


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.integers(2, 5),
    st.sampled_from([1, 1, 4]),
    st.sampled_from([Mode.REPLICATED, Mode.SHARDED]),
    st.lists(st.integers(0, 120), min_size=1, max_size=6),
    st.sampled_from([0, 0.1, 0.5]),
    st.integers(),
)
def test_whichever_ranks_die_in_their_copies_a_step_is_left_that_all_restore_exactly(
    count, every, apart, mode, attempts, death, seed
):
    job = Job(count, every, apart, mode, Random(seed))
    for events in attempts:
        job.run(events, death)
        job.restart(job.chosen())
