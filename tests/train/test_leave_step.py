"""All workers of a round leave it at the same step, whatever the timing of threads and the network."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrs.train.state_machine import AHEAD, AT_ONCE, LeaveStep, agreed, heard, said


class Worker:
    """A main thread that passes step boundaries, and a second thread that learns of a change at
    some moment.
    """

    def __init__(self) -> None:
        self.step = LeaveStep()
        self.cap: int | None = None
        self.left: int | None = None

    def may_pass(self, others: list["Worker"], is_coupled: bool) -> bool:
        """Return false while the worker waits: at its cap, or in a collective for a worker that is a step
        behind.
        """
        if self.left is not None or self.step.verdict() == "wait":
            return False
        return not is_coupled or all(other.step.done >= self.step.done for other in others)

    def passes(self) -> None:
        self.step.done += 1
        if self.step.verdict() == "leave":
            self.left = self.step.done


@settings(deadline=None, max_examples=500)
@given(seed=st.integers(0), size=st.integers(1, 5), is_coupled=st.booleans(), told_after=st.integers(0, 20))
def test_all_workers_leave_a_round_at_the_same_step(seed, size, is_coupled, told_after):
    chance = Random(seed)
    workers = [Worker() for _ in range(size)]
    published: dict[int, int] = {}
    leave: list[int] = []
    for turn in range(1000):
        moves = [("pass", each) for each in workers if each.may_pass(workers, is_coupled)]
        if turn >= told_after:
            moves += [("tell", each) for each in workers if each.cap is None]
            moves += [
                ("publish", each) for each in workers if each.cap is not None and id(each) not in published
            ]
            if len(published) == size and not leave:
                moves.append(("agree", workers[0]))
            moves += [("hear", each) for each in workers if leave and each.step.at is None]
        if not moves:
            break
        what, worker = chance.choice(moves)
        if what == "pass":
            worker.passes()
        elif what == "tell":
            worker.cap = worker.step.set_cap()
            assert worker.cap == worker.step.done + AHEAD
        elif what == "publish":
            published[id(worker)] = worker.cap
        elif what == "agree":
            leave.append(agreed(list(published.values())))
        else:
            # No worker is beyond this step, so all of them can still leave there.
            assert worker.step.done <= leave[0]
            worker.step.at = leave[0]
            if worker.step.verdict() == "leave":
                worker.left = worker.step.done
    assert [worker.left for worker in workers] == [leave[0]] * size


@given(at=st.integers(1, 2**60), saves=st.booleans())
def test_an_encoded_leave_step_decodes_to_the_same_value(at, saves):
    assert heard(said(at, saves=saves)) == (at, saves)


def test_set_cap_keeps_the_first_cap():
    step = LeaveStep()
    assert step.set_cap() == AHEAD
    step.done = 1
    assert step.set_cap() == AHEAD


def test_a_broken_round_is_left_at_the_next_step_boundary():
    step = LeaveStep(done=3)
    assert step.verdict() == "go"
    step.at = AT_ONCE
    assert step.verdict() == "leave"
