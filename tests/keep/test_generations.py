"""Tests of how ranks of several nodes agree on copies of their training states (generations of copies)."""

import threading
from random import Random

from helpers.procs import HANG, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrs._engine.inside.keep.schedule import Generations


class Apart:
    """Model of ranks on several nodes that each have a part of the state. Rank 0 announces the steps of which
    all copy their parts, and then compares which copies they have. A rank ends a step when all ranks have
    sent their gradients, and when its own last copy is complete. A rank may learn of a step too late, fail to
    copy it, or turn Keep off.
    """

    def __init__(self, count, every, random):
        self.ranks, self.every, self.random = range(count), every, random
        self.generations = [Generations(None) for _ in self.ranks]
        for each in self.generations:
            each.begin_first(None)
        self.ended, self.sent, self.known = [0] * count, [0] * count, [0] * count
        self.slots = [[None, None] for _ in self.ranks]
        self.copying = [None] * count
        self.number, self.secured, self.reports, self.results = 0, 0, {}, []

    def actions(self):
        for rank in self.ranks:
            made = self.generations[rank]
            if self.copying[rank] is not None:
                yield self.finish_copy, rank
            if self.sent[rank] == self.ended[rank]:
                yield self.send, rank
            elif self.copying[rank] is None and min(self.sent) >= self.sent[rank]:
                yield self.end_step, rank
            if self.known[rank] < len(self.results):
                yield self.learn, rank
            elif made._finished == self.number and rank not in self.reports:
                yield self.report, rank

    def send(self, rank):
        self.sent[rank] += 1

    def report(self, rank):
        _, copied = self.generations[rank].wait(-1)
        self.reports[rank] = None if self.generations[rank].off else copied
        if len(self.reports) == len(self.ranks):
            is_whole = None not in self.reports.values()
            if is_whole:
                self.secured = self.number
            self.number = max(self.ended) + self.random.randint(1, self.every)
            self.results.append((is_whole, self.number))
            self.reports = {}

    def learn(self, rank):
        is_whole, announced = self.results[self.known[rank]]
        self.known[rank] += 1
        _, copied = self.generations[rank].wait(-1)
        self.generations[rank].settle(copied, is_secured=is_whole)
        self.generations[rank].announce(announced)

    def turn_off(self, rank):
        self.generations[rank].turn_off("why")
        if self.copying[rank] is not None:
            self.copying[rank] = None

    def free(self, rank):
        kept = self.generations[rank].protected() - {None}
        return [at for at in (0, 1) if self.slots[rank][at] not in kept]

    def end_step(self, rank):
        self.ended[rank] = step = self.ended[rank] + 1
        if not self.generations[rank].off:
            self.generations[rank].end_step(step)
            if self.generations[rank].is_due(step - 1, step):
                slot = self.random.choice(self.free(rank))
                self.slots[rank][slot], self.copying[rank] = None, slot

    def finish_copy(self, rank):
        slot, self.copying[rank] = self.copying[rank], None
        is_kept = self.random.random() < 0.95
        self.slots[rank][slot] = self.ended[rank] if is_kept else None
        self.generations[rank].note_copy(self.ended[rank], is_kept=is_kept)

    def common(self):
        return max(set.intersection(*map(set, self.slots)) - {None}, default=0)

    def copy_at_death(self, rank):
        if self.copying[rank] is not None:
            self.finish_copy(rank)
        is_new = self.ended[rank] not in self.slots[rank] and not self.generations[rank].off
        if is_new and (free := self.free(rank)):
            self.slots[rank][self.random.choice(free)] = self.ended[rank]


@settings(deadline=None)
@given(st.integers(2, 4), st.integers(2, 9), st.integers(0, 150), st.booleans(), st.integers())
def test_ranks_of_several_nodes_never_overwrite_their_last_common_step(count, every, length, ends, seed):
    model = Apart(count, every, Random(seed))
    for _ in range(length):
        act, rank = model.random.choice([*model.actions()])
        act(rank)
        if ends and model.random.random() < 0.01:
            model.turn_off(model.random.choice(model.ranks))
        assert model.common() >= model.secured
    are_on = not any(each.off for each in model.generations)
    # Copies of a step that all ranks have made are kept, even if the ranks have not compared them yet.
    before = model.common() if are_on else model.secured
    dead = model.random.choice([None, *model.ranks])
    if dead is None:
        # No rank has died, as at an exception or a stop. So each rank still ends its step, learns which
        # copies the other ranks have, and then copies its state.
        while work := [each for each in model.actions() if each[0] != model.send]:
            act, rank = model.random.choice(work)
            act(rank)
    elif model.copying[dead] is not None:
        model.copying[dead] = None
    for rank in model.ranks:
        if rank != dead:
            model.copy_at_death(rank)
    assert model.common() >= before
    if dead is None and are_on:
        assert model.common() == max(model.ended) or len(set(model.ended)) > 1


def test_a_failure_does_not_wait_for_a_comparison_that_has_ended():
    generations, is_done = Generations(None), threading.Event()
    generations.are_compared = True
    generations.begin_copy(1, 1)

    def wait():
        generations.await_settled(HANG)
        is_done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: generations._changed._waiters)
    generations.end_comparing()
    assert is_done.wait(HANG / 2)
    thread.join(HANG)
