"""Decisions of the training loop: for one worker, and for several workers whose collectives, rendezvous and
processes fail at any point.
"""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from elasticrs.train.state_machine import OF_OTHERS, Action, Event, Loop, transition

ENDS = {Action.RETURN, Action.GIVE_UP, Action.RAISE}
AFTER = {
    Action.MEET: (Event.MET, Event.MET_AT_THE_END, Event.FAILED, Event.BROKEN_OFF, Event.BROKE, Event.ENDED),
    Action.SYNC: (Event.SYNCED, Event.FAILED, Event.BROKEN_OFF, Event.BROKE, Event.CUT),
    Action.STEP: (
        *(Event.STEPPED, Event.CHANGED, Event.LEAVES, Event.OUT_OF_DATA, Event.FAILED, Event.BROKE),
        *(Event.BROKEN_OFF, Event.ENDED, Event.CUT),
    ),
}
"""What may follow from an action."""


@given(st.data(), st.integers(1, 5))
def test_the_loop_rules_hold_for_every_sequence_of_events(data, max_failures):
    loop, event, failures, broken_off = Loop(max_failures), Event.BEGIN, 0, 0
    is_synced = knows_the_end = False
    for _ in range(60):
        before = loop
        loop, actions = transition(loop, event)
        assert before == before.replaced()
        failures += event is Event.FAILED
        broken_off += event is Event.BROKEN_OFF
        if event in {Event.STEPPED, Event.CHANGED}:
            failures = broken_off = 0
        knows_the_end |= event in {Event.OUT_OF_DATA, Event.MET_AT_THE_END}
        is_synced = event in {Event.SYNCED, Event.STEPPED}
        # TRAIN-1
        assert (Action.ROLL_BACK in actions) == (event in {Event.FAILED, Event.BROKEN_OFF, Event.CUT})
        assert actions.index(Action.ROLL_BACK) == 0 if Action.ROLL_BACK in actions else True
        # TRAIN-2, TRAIN-4
        if Action.STEP in actions:
            assert is_synced
            assert not knows_the_end
        # TRAIN-3
        assert (Action.GIVE_UP in actions) == (failures >= max_failures or broken_off >= 10 * max_failures)
        # TRAIN-5
        assert actions == (Action.LEAVE, Action.RETURN) or Action.LEAVE not in actions
        assert (Action.LEAVE in actions) == (event is Event.LEAVES)
        # TRAIN-4
        assert (Action.CLOSE in actions) == (event is Event.SYNCED and knows_the_end)
        assert not ENDS.intersection(actions[:-1])
        if actions[-1] in ENDS:
            return
        event = data.draw(st.sampled_from(AFTER[actions[-1]]))


def test_a_completed_step_resets_the_failure_count():
    loop = Loop(3)
    for _ in range(10):
        for event in (Event.FAILED, Event.BROKEN_OFF, Event.FAILED, Event.MET, Event.SYNCED, Event.STEPPED):
            loop, actions = transition(loop, event)
    assert actions == (Action.STEP,)
    assert loop == Loop(3)


@pytest.mark.parametrize(
    ("failures", "event", "times"),
    [
        (1, Event.FAILED, 1),
        (4, Event.FAILED, 4),
        # Allow more failures if other workers caused them.
        (2, Event.BROKEN_OFF, 2 * OF_OTHERS),
    ],
)
def test_the_loop_gives_up_after_the_maximum_number_of_failures(failures, event, times):
    loop = Loop(failures)
    for _ in range(times - 1):
        loop, actions = transition(loop, event)
        assert actions == (Action.ROLL_BACK, Action.MEET)
    assert transition(loop, event)[1] == (Action.ROLL_BACK, Action.GIVE_UP)


class Worker:
    """A simulated process: its loop, and its state, which is the tuple of the steps that it has taken."""

    def __init__(self, length):
        self.length = length
        self.loop = Loop(10**6)
        self.state = self.snapshot = ()
        self.tell(Event.BEGIN)

    def tell(self, event):
        self.loop, (*before, self.doing) = transition(self.loop, event)
        if Action.ROLL_BACK in before:
            self.state = self.snapshot
        # Take a snapshot. In real training, each step takes its own.
        self.snapshot = self.state


class World:
    """Several workers. Each round and each collective randomly succeeds or fails for each of them."""

    def __init__(self, seed, size, length):
        self.random, self.length = random.Random(seed), length
        self.workers = [self.newcomer() for _ in range(size)]
        self.faults = 60
        self.steps = 0
        self.committed = {()}
        """Every state from which some worker has gone on."""

    def newcomer(self):
        return Worker(self.length + self.random.randrange(3))

    def fault(self, percent):
        self.faults -= self.faults > 0 and (bad := self.random.randrange(100) < percent)
        return self.faults > 0 and bad

    def run(self):
        while active := [worker for worker in self.workers if worker.doing is not Action.RETURN]:
            assert {worker.doing for worker in active} == {Action.MEET}
            if len(active) < len(self.workers):
                # A worker that has returned has closed the job, so the others end, too.
                for worker in active:
                    worker.tell(Event.ENDED)
                return
            self.meet()
            if self.workers[0].doing is Action.SYNC:
                self.sync()
            while all(worker.doing is Action.STEP for worker in self.workers):
                self.step()
                self.kill_one()
            self.break_up()

    def meet(self):
        is_end = any(worker.loop.at_the_end for worker in self.workers)
        for worker in self.workers:
            worker.tell(Event.FAILED if self.fault(10) else Event.MET_AT_THE_END if is_end else Event.MET)
        if any(worker.doing is Action.MEET for worker in self.workers):
            self.break_up()

    def sync(self):
        best = max((worker.state for worker in self.workers), key=len)
        # The longest state is an extension of all others, so no committed step is lost.
        assert all(best[: len(worker.state)] == worker.state for worker in self.workers)
        is_whole = True
        for worker in self.workers:
            if self.fault(10):
                is_whole, worker.state = False, "half a state"
                worker.tell(Event.FAILED)
            else:
                worker.state = worker.snapshot = best
        # No worker passes the barrier before all have reached it, but some may fail before they learn of
        # that.
        for worker in self.workers:
            if worker.doing is Action.SYNC:
                worker.tell(Event.SYNCED if is_whole and not self.fault(5) else Event.FAILED)

    def step(self):
        self.steps += 1
        # If a worker fails or has no data before the collective, no worker gets its result.
        missing = [self.before(worker) for worker in self.workers]
        for worker, event in zip(self.workers, missing, strict=True):
            if event is Event.OUT_OF_DATA:
                worker.tell(event)
            elif any(missing):
                worker.state = "half a step"
                worker.tell(Event.FAILED)
            else:
                # All workers have contributed, but each may still fail before the end of its step.
                worker.state = (*worker.state, self.steps)
                worker.tell(
                    Event.FAILED if self.fault(8) else Event.CHANGED if self.fault(5) else Event.STEPPED
                )
                self.committed.add(worker.state)

    def before(self, worker):
        if len(worker.state) >= worker.length:
            return Event.OUT_OF_DATA
        return Event.FAILED if self.fault(5) else None

    def kill_one(self):
        """Occasionally replace a worker by a new one, provided that another worker has the latest state."""
        victim = self.random.randrange(len(self.workers))
        others = [worker.state for worker in self.workers[:victim] + self.workers[victim + 1 :]]
        if max(map(len, others), default=-1) == max(len(worker.state) for worker in self.workers) and (
            self.fault(5)
        ):
            self.workers[victim] = self.newcomer()

    def break_up(self):
        """End the round. The remaining workers notice that in their next collective or at a step boundary."""
        for worker in self.workers:
            if worker.doing is Action.SYNC or (worker.doing is Action.STEP and self.random.randrange(2)):
                worker.state = "torn"
                worker.tell(Event.FAILED)
            elif worker.doing is Action.STEP:
                worker.tell(Event.CHANGED)


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 12))
def test_no_step_is_committed_by_some_workers_and_lost_by_others(seed, size, length):
    world = World(seed, size, length)
    world.run()
    (final,) = {worker.state for worker in world.workers}
    # Each step was taken once and by all workers. The number of steps depends on the worker with the least
    # data.
    assert len(set(final)) == len(final)
    assert length <= len(final) <= length + 2
    assert all(final[: len(state)] == state for state in world.committed)
