"""The agent chooses the training step after which all ranks get a signal, and sends it exactly once."""

import os
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.inside.keep import layout
from elasticrs._engine.inside.keep.layout import Agreed, AgreedState
from elasticrs._engine.supervise.run import agreed_step
from elasticrs._engine.supervise.run.agreed_step import (
    AgreedSteps,
    Delivery,
    NodeSteps,
    RankSteps,
    Send,
    common_step,
    look,
    progress,
)
from elasticrs._engine.supervise.state_machine import Phase, Stop
from elasticrs._engine.workers.keep_files import KeepFiles
from elasticrs._engine.workers.plan import MemoryFiles


@given(newest=st.integers(2, 1 << 40), nodes=st.lists(st.lists(st.booleans(), min_size=1), min_size=1))
def test_the_chosen_step_is_the_first_that_no_rank_has_passed(newest, nodes):
    steps = [[newest - is_behind for is_behind in node] for node in nodes]
    found = [
        progress({rank: RankSteps(True, each) for rank, each in enumerate(node)}, 10.0) for node in steps
    ]
    assert common_step(found) == max(map(max, steps)) + 1


@given(nodes=st.lists(st.lists(st.integers(1, 9), min_size=1), min_size=1))
def test_a_step_is_chosen_if_and_only_if_all_ranks_train_in_step(nodes):
    found = [
        progress({rank: RankSteps(True, each) for rank, each in enumerate(node)}, 10.0) for node in nodes
    ]
    chosen = common_step(found)
    assert isinstance(chosen, int) == (max(map(max, nodes)) - min(map(min, nodes)) <= 1)
    assert isinstance(chosen, int) or chosen.why


def test_no_step_is_chosen_if_a_rank_has_made_none_or_a_node_cannot_wait():
    found = progress({0: RankSteps(True, 4), 1: RankSteps(False, 0)}, 10.0)
    assert isinstance(found, Send)
    assert "local rank 1" in found.why
    refused = common_step([NodeSteps(4, 5), None])
    assert isinstance(refused, Send)
    assert refused.why


@given(at=st.floats(0, 100), duration=st.floats(0, 100), until=st.floats(100, 200))
def test_no_step_is_chosen_that_cannot_end_in_time(at, duration, until):
    found = progress({0: RankSteps(True, 5, at, duration), 1: RankSteps(True, 5, at, duration)}, until)
    assert isinstance(found, NodeSteps) == (at + duration <= until)


@given(
    ready=st.lists(st.sampled_from([0, 3, 4]), min_size=1, max_size=8),
    missed=st.sampled_from([0, 3, 4]),
    is_over=st.booleans(),
)
def test_a_signal_waits_for_all_ranks_but_not_for_ever(ready, missed, is_over):
    seen = {rank: RankSteps(True, 5, ready=number) for rank, number in enumerate(ready)}
    seen[0] = seen[0].replaced(missed=missed)
    found = look(seen, 4, is_over=is_over)
    if missed != 4 and set(ready) == {4}:
        assert found == Send()
    elif missed == 4 or is_over:
        assert found is not None
        assert found.why
    else:
        assert found is None


def test_nobody_is_awaited_when_all_workers_have_exited():
    assert progress({}, 10.0) == Send()
    assert look({}, 4, is_over=False) == Send()


class Job:
    """A job without worker processes: the test writes what they would write into their files in memory."""

    def __init__(self, workers):
        self.files = KeepFiles(MemoryFiles(workers))
        self.pids = {rank: os.getpid() for rank in range(workers)}
        self.sent, self.told, self.lines = [], [], []
        self.handles = True
        attempt = SimpleNamespace(keep_files=self.files, running=lambda: self.pids)

        def record(signum):
            self.sent.append(signum)
            return ()

        tracker = SimpleNamespace(
            attempt=attempt,
            stop=lambda action: self.sent.append(action.signum),
            forward=lambda signum, **_: record(signum),
        )
        self.decisions = SimpleNamespace(plan=None, begin_exchange=None, phase=Phase.RUNNING)
        spec = SimpleNamespace(keep_grace=1.0)
        self.agreed = AgreedSteps(tracker, self.decisions, spec, self.lines.append)

    def begin(self, signum=10, hold=5.0, begin_exchange=None):
        def send(_waited):
            self.sent.append(signum)
            return ()

        is_stop = signum == 15
        self.agreed.begin(signum, hold, send, self.told.append, begin_exchange, is_stop=is_stop)

    def put(self, rank, **words):
        for name, value in words.items():
            os.pwrite(self.files.memory.fds[rank], layout.pack([value]), layout.WORD * getattr(Agreed, name))

    def asked(self, rank):
        """Return what the agent asks a worker for in its file: number of the request, state, and step."""
        size = 3 * layout.WORD
        return layout.unpack(os.pread(self.files.memory.fds[rank], size, layout.WORD * Agreed.NUMBER))

    def train(self, steps):
        for rank in self.pids:
            self.put(rank, OWNER=os.getpid(), STEPS=steps)

    def let_choose(self):
        """Let the agent look at the workers' files until it has chosen the step."""
        while self.asked(0)[1] == AgreedState.WAIT:
            assert 0 < self.agreed.seconds_left() < 1

    def let_send(self):
        """Have all ranks stop after the step that the agent chooses, and let it send the signals."""
        self.let_choose()
        number, _, step = self.asked(0)
        for rank in self.pids:
            self.put(rank, STEPS=step, READY=number, READY_AT=time.monotonic_ns())
        self.agreed.seconds_left()

    def steps_told(self):
        """Return each signal that was told as sent, with its step."""
        return [(each.signum, each.step) for each in self.told]


def exchange_of(nodes):
    """Return a function that begins an exchange in which all nodes tell the same steps. It never ends without
    nodes.
    """

    def begin(own):
        return SimpleNamespace(values=[own] * nodes or None, is_lost=False, end=lambda: None)

    return begin


@pytest.fixture
def job(monkeypatch):
    job = Job(2)
    monkeypatch.setattr(agreed_step, "can_take", lambda _pid, _signum: job.handles)
    yield job
    job.files.memory.close()


def test_all_ranks_get_the_signal_after_the_step_that_was_chosen(job):
    assert job.agreed.seconds_left() == float("inf")
    job.train(7)
    job.put(1, STEPS=8)
    job.begin()
    assert [job.asked(rank)[:2] for rank in (0, 1)] == [(1, AgreedState.WAIT)] * 2
    job.let_choose()
    assert [job.asked(rank) for rank in (0, 1)] == [(1, AgreedState.ACT, 9)] * 2
    job.put(0, READY=1, READY_AT=time.monotonic_ns())
    assert job.agreed.seconds_left() < 1
    assert job.sent == []
    job.put(1, READY=1, READY_AT=time.monotonic_ns(), PAUSED=200_000)
    job.agreed.seconds_left()
    assert job.sent == [10]
    assert job.asked(0)[1] == AgreedState.SENT
    (told,) = job.told
    assert (told.signum, told.step, told.why) == (10, 9, "")
    assert 0.0002 < told.paused <= told.waited


def test_a_signal_is_sent_at_once_if_its_moment_does_not_matter(job):
    job.begin()
    assert (job.sent, job.told[0].why, job.lines) == ([10], "", [])
    job.train(7)
    job.handles = False
    job.begin()
    assert (job.sent, job.told[1].step, job.lines) == ([10, 10], None, [])
    assert job.agreed.seconds_left() == float("inf")


@pytest.mark.parametrize(("is_planned", "size", "why"), [(False, 1, "failed"), (True, 2, "exchange")])
def test_a_stop_without_an_agreed_step_is_told_with_the_reason(job, is_planned, size, why):
    job.train(7)
    job.begin()
    job.decisions.plan = SimpleNamespace(ranks=[SimpleNamespace(group_world_size=size)])
    job.agreed.stop(Stop(15, 30.0, is_planned=is_planned), job.told.append)
    assert job.sent == [10, 15]
    assert [(each.signum, each.step, bool(each.why)) for each in job.told] == [
        (10, None, True),
        (15, None, True),
    ]
    assert why in job.told[1].why


@pytest.mark.parametrize(
    ("hold", "values", "is_lost", "step"),
    [
        (60.0, [b"7 8", b"8 8"], False, 9),
        (60.0, [b"7 8", b""], False, None),
        (60.0, [b"7 8", b"9 9"], False, None),
        (60.0, [b"7 8", b"damaged"], False, None),
        (60.0, [b"7 8", b"7 7 7"], False, None),
        (60.0, None, True, None),
        (0.02, None, False, None),
    ],
)
def test_the_values_of_all_nodes_decide_on_the_step(job, hold, values, is_lost, step):
    ended, told = [], []
    exchange = SimpleNamespace(values=None, is_lost=False, end=lambda: ended.append(1))
    job.train(7)
    job.put(1, STEPS=8)
    job.begin(hold=hold, begin_exchange=lambda own: told.append(own) or exchange)
    while not told:
        job.agreed.seconds_left()
    assert told == [b"7 8"]
    assert job.agreed.seconds_left() < 1
    assert job.sent == []
    exchange.values, exchange.is_lost = values, is_lost
    while job.asked(0)[1] == AgreedState.WAIT:
        job.agreed.seconds_left()
    if step is None:
        assert job.sent == [10]
        assert job.told[0].why
        assert ended
    else:
        assert job.asked(0) == (1, AgreedState.ACT, step)


@pytest.mark.parametrize("signals", [(10, 15), (15, 10), (10, 12), (12, 10), (12, 15, 10)])
@pytest.mark.parametrize("is_chosen", [False, True])
def test_signals_that_are_held_together_reach_the_ranks_in_one_order_after_one_step(job, signals, is_chosen):
    job.train(7)
    for signum in signals:
        job.begin(signum)
        if is_chosen:
            job.let_choose()
            job.put(1, READY=job.asked(1)[0])
            job.agreed.seconds_left()
    assert (job.sent, job.told) == ([], [])
    assert all(map(job.agreed.is_held, signals))
    job.let_send()
    assert job.sent == sorted(signals)
    assert job.steps_told() == [(signum, 8) for signum in sorted(signals)]
    assert not any(map(job.agreed.is_held, signals))


@pytest.mark.parametrize("end", ["failure", "exit"])
@pytest.mark.parametrize("size", [1, 2])
def test_each_held_signal_is_told_once_if_the_wait_ends_early(job, end, size):
    job.train(7)
    for signum in (10, 15):
        job.begin(signum, begin_exchange=None if size == 1 else exchange_of(1))
        job.let_choose()
    job.agreed.end("a rank has failed") if end == "failure" else job.agreed.cancel()
    assert job.sent == ([10, 15] if end == "failure" else [])
    assert [(each.signum, each.step, bool(each.why)) for each in job.told] == [
        (10, None, True),
        (15, None, True),
    ]


def test_a_second_signal_shortens_the_hold_of_the_first(job):
    job.train(7)
    job.begin(10, hold=60.0)
    job.begin(15, hold=0.05)
    job.let_choose()
    job.put(0, READY=2)
    begun = time.monotonic()
    while job.agreed.is_held(10):
        job.agreed.seconds_left()
        assert time.monotonic() - begun < 30
    assert job.sent == [10, 15]


def test_a_step_that_other_nodes_may_have_chosen_is_kept_when_a_second_signal_comes(job):
    job.train(7)
    job.begin(10, begin_exchange=exchange_of(2))
    job.let_choose()
    job.begin(15, begin_exchange=exchange_of(2))
    assert job.asked(0) == (1, AgreedState.ACT, 8)
    job.let_send()
    assert (job.sent, job.asked(0)[:2]) == ([10], (2, AgreedState.WAIT))
    # The ranks still wait for the first signal, which may arrive later than this second request.
    assert layout.unpack(os.pread(job.files.memory.fds[0], layout.WORD, layout.WORD * Agreed.SENT)) == (1,)
    job.let_send()
    assert job.sent == [10, 15]
    assert job.steps_told() == [(10, 8), (15, 9)]


def test_a_second_signal_is_not_delayed_by_nodes_that_did_not_get_the_first(job, monkeypatch):
    monkeypatch.setattr(agreed_step, "_SECOND_SIGNAL_LIMIT", 0.01)
    job.train(7)
    job.begin(10, begin_exchange=exchange_of(0))
    job.begin(15, begin_exchange=exchange_of(2))
    while job.asked(0)[0] == 1:
        assert job.agreed.seconds_left() < 1
    job.let_send()
    assert job.sent == [10, 15]
    assert job.steps_told() == [(10, 8), (15, 8)]


def test_a_signal_that_comes_after_a_held_stop_waits_with_it(job):
    job.train(7)
    job.begin(15)
    job.decisions.phase = Phase.STOPPING
    job.agreed.pass_on(10, job.told.append)
    assert job.sent == []
    job.let_send()
    assert job.sent == [10, 15]
    assert job.steps_told() == [(10, 8), (15, 8)]


def test_a_failure_sends_the_signal_that_is_held_back_at_once(job):
    job.train(7)
    job.begin()
    job.let_choose()
    job.agreed.end("a rank has failed")
    job.agreed.end("a rank has failed")
    assert job.sent == [10]
    assert [(each.step, each.why) for each in job.told] == [(None, "a rank has failed")]
    assert job.asked(0)[1] == AgreedState.NONE


def test_no_signal_is_sent_after_the_workers_have_exited(job):
    job.train(7)
    job.begin()
    job.agreed.cancel()
    assert job.sent == []
    assert job.told[0].step is None
    assert job.told[0].why


def test_a_rank_that_does_not_come_gets_the_signal_when_the_hold_is_over(job, monkeypatch):
    job.train(7)
    job.begin(hold=0.05)
    job.let_choose()
    job.put(0, READY=1)
    while job.agreed.seconds_left() < 1:
        pass
    assert job.sent == [10]
    assert "local rank 1" in job.told[0].why
    # Once a rank has stopped to wait for the signal, it is held back for a shorter time.
    monkeypatch.setattr(agreed_step, "_STALL", 0.01)
    job.begin()
    job.let_choose()
    job.put(0, READY=2)
    while job.agreed.seconds_left() < 1:
        pass
    assert job.sent == [10, 10]
    assert isinstance(job.told[1], Delivery)


def test_files_say_that_nothing_is_asked_some_time_after_the_signal(job, monkeypatch):
    monkeypatch.setattr(agreed_step, "_RESET", 0.01)
    job.train(7)
    job.begin()
    job.let_choose()
    for rank in (0, 1):
        job.put(rank, READY=1)
    while job.agreed.seconds_left() != float("inf"):
        pass
    assert [job.asked(rank)[1] for rank in (0, 1)] == [AgreedState.NONE] * 2


def test_the_next_attempt_begins_without_a_request_in_its_files(job):
    own = {rank: {} for rank in job.pids}
    job.train(7)
    job.files.begin({}, own, None)
    assert [job.files.steps_of(rank)[1] for rank in own] == [7, 7]
    job.begin()
    assert job.agreed.is_asking
    job.agreed.cancel()
    assert not job.agreed.is_asking
    job.files.begin({}, own, None)
    assert [job.asked(rank) for rank in own] == [(0, AgreedState.NONE, 0)] * 2
    assert not any(sum(job.files.steps_of(rank)) for rank in own)
