"""The rule by which ranks copy their state into slots, explored over all states that a job can reach.

The model is that of sharded state: a step can be restored only if every rank has it in a slot.
"""

from collections import deque
from typing import NamedTuple

import pytest


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
