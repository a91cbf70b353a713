"""``train`` and ``run_train`` with threads as workers. Any of their calls may fail once."""

import sys

import hypothesis.strategies as st
import pytest
from helpers.launcher import clean_environment
from helpers.procs import run_program
from helpers.said import says
from hypothesis import given

import elasticrs.train
from elasticrs.train import (
    NonRetryableException,
    RetryableException,
    SimpleWorkerStats,
    StopException,
    metrics,
    run_train,
    state_machine,
    train,
)
from elasticrs.train.coordinator import FinalState
from elasticrs.train.running import to_generator

from .threads import Job, Sum, add, train_sum, train_sums

DONE = (10, 550)


def once(error, when):
    """Return a train step that raises ``error`` once, when the state has taken ``when`` steps."""
    raised = []

    def step(state):
        if state.steps == when and not raised:
            raised.append(True)
            raise error
        return add(state)

    return step


@pytest.mark.parametrize("size", [1, 4])
def test_to_generator_turns_a_train_step_into_a_generator(size):
    steps = to_generator(once(RuntimeError("a step that fails"), 4))

    def work(name, coordinator):
        done = run_train(coordinator, steps, Sum(coordinator, 10))
        return done.steps, done.total

    assert Job(size).run(work) == [DONE] * size


def test_run_train_starts_a_new_generator_after_each_rendezvous():
    made = []

    def steps(state):
        made.append(state.steps)
        try:
            while state.steps < state.length:
                add(state)
                yield state, SimpleWorkerStats(1.0)
                state.coordinator.wants_to_meet = state.steps == 5
        finally:
            made.append("closed")

    def work(name, coordinator):
        state = Sum(coordinator, 10)
        assert run_train(coordinator, steps, state) is state
        return state.steps, state.total

    assert Job(1).run(work) == [DONE]
    # After the fifth step, the workers have met again, with a new generator.
    assert made == [0, "closed", 6, "closed"]


def test_an_error_that_is_not_retryable_is_fatal_for_its_worker():
    def work(name, coordinator):
        step = once(NameError("no_such_name"), 4) if name in {1, 2} else add
        try:
            return train_sum(coordinator, step=step)
        finally:
            assert ("leave" in coordinator.calls) == (name in {1, 2})
            assert any(isinstance(error, NameError) for error in coordinator.errors) == (name in {1, 2})

    first, *died, last = Job(4).run(work)
    assert first == last == DONE
    assert {type(error) for error in died} == {NameError}


@pytest.mark.parametrize("error", [NotImplementedError("x"), RecursionError("x"), NonRetryableException("x")])
def test_programming_errors_are_not_retried(error):
    assert train_sums(step=once(error, 0)) == [error]


@pytest.mark.parametrize("code", [0, None])
def test_an_exit_with_0_during_training_is_an_error(code):
    (found,) = train_sums(step=once(SystemExit(code), 3))
    assert isinstance(found, NonRetryableException)


def test_retryable_errors_can_be_chosen():
    def work(name, coordinator):
        return train_sum(coordinator, step=once(KeyError("x"), 3), retryable=(RuntimeError, KeyError))

    assert Job(2).run(work) == [DONE] * 2
    (found,) = train_sums(step=once(RuntimeError("x"), 3), retryable=(KeyError,))
    assert isinstance(found, RuntimeError)


def test_only_the_first_own_error_is_logged_with_a_traceback(caplog):
    train_sums(step=always(RuntimeError("wrong shape")), max_failures=3)
    told = [record for record in caplog.records if "wrong shape" in record.message]
    assert [bool(record.exc_info) for record in told] == [True, False, False]


def test_a_worker_that_always_fails_gives_up_and_the_others_continue(monkeypatch):
    monkeypatch.setattr("elasticrs.train.running.MAX_FAILURES", 5)

    def work(name, coordinator):
        def step(state):
            if name == 0 and state.steps == 3:
                raise RetryableException("again and again")
            return add(state)

        return train_sum(coordinator, step=step)

    first, *others = Job(3).run(work)
    says(str(first), "failures: 5 ", " 0 ")
    assert isinstance(first.__cause__, RetryableException)
    assert others == [DONE] * 2
    (found,) = train_sums(step=always(RuntimeError("x")), max_failures=2)
    assert "failures: 2 of" in str(found)


def always(error):
    def step(state):
        raise error

    return step


def test_the_first_worker_without_data_ends_the_job_and_all_states_are_equal():
    found = Job(4).run(lambda name, coordinator: train_sum(coordinator, length=10 + name))
    assert found == [DONE] * 4


class Saved(Sum):
    def save(self, stream):
        stream.write(b"%d %d" % (self.steps, self.total))

    def load(self, stream):
        self.steps, self.total = map(int, stream.read().split())


def late(final, state=Saved):
    """Return the result or the exception of a worker that starts after a job of two workers has finished."""
    job = Job(2)
    job.run(lambda _, coordinator: train_sum(coordinator))
    job.alive = {7}

    def work(_, coordinator):
        coordinator.final_state = lambda: final
        return train_sum(coordinator, state=state)

    (found,) = job.run(work)
    return found


def test_a_late_worker_returns_the_final_state():
    assert late(FinalState(b"10 550", False, "")) == DONE


@pytest.mark.parametrize(
    ("final", "state", "reason"),
    [
        (None, Saved, "final state"),
        (FinalState(None, False, "all died"), Saved, "all died"),
        (FinalState(None, True, "no checkpoint"), Saved, "no checkpoint"),
        (FinalState(b"10 550", False, ""), Sum, "Sum has neither state_dict nor save"),
        (FinalState(b"torn", False, ""), Saved, "cannot be loaded: ValueError"),
    ],
)
def test_a_late_worker_fails_if_it_cannot_get_the_final_state(final, state, reason):
    found = late(final, state)
    assert isinstance(found, NonRetryableException)
    assert reason in str(found)


def test_a_job_closed_before_the_first_sync_is_an_error():
    class Closed(Sum):
        def sync(self, *_):
            raise StopException

    (found,) = train_sums(state=Closed)
    assert isinstance(found, NonRetryableException)


METHODS = (
    *("rendezvous_barrier", "init_process_group", "barrier", "exchange", "should_rendezvous"),
    *("should_stop_training", "announce_end", "monitor_progress", "report_progress"),
    *("sync", "capture_snapshot", "step"),
)


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(METHODS), st.integers(0, 12), st.booleans()), max_size=4
    ),
)
def test_training_completes_if_any_call_fails_at_any_time(size, faults):
    def work(name, coordinator):
        state = Sum(coordinator, 10)

        def step(state):
            return add(state)

        holder = type("Holder", (), {"step": staticmethod(step)})()
        for who, method, call, is_late in faults:
            if who == name:
                owner = next(each for each in (coordinator, state, holder) if hasattr(each, method))
                setattr(owner, method, failing(getattr(owner, method), call, is_late))
        done = train(coordinator, holder.step, state)
        return done.steps, done.total

    assert Job(size).run(work) == [DONE] * size


def failing(plain, when, is_late):
    """Return a function like ``plain`` whose call number ``when`` fails, before or after it has done its
    work.
    """
    calls = []

    def call(*args):
        calls.append(args)
        if len(calls) != when + 1:
            return plain(*args)
        if is_late:
            plain(*args)
        raise RuntimeError(f"call {when} of {plain}")

    return call


def test_a_stop_during_a_step_returns_the_state_before_that_step():
    def step(state):
        done = add(state)
        if state.steps > 4:
            raise StopException
        return done

    assert train_sums(step=step) == [(4, 100)]


class Unfit(Sum):
    """A state whose snapshots cannot be applied."""

    def apply_snapshot(self, _):
        raise RuntimeError("torn")


def test_a_failed_rollback_is_fatal():
    (found,) = train_sums(step=once(RuntimeError("x"), 2), state=Unfit)
    assert str(found) == "torn"


# --- bad input ---


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (3, "train_step returned 3, expected (state, worker_stats)"),
        (None, "train_step returned None"),
        ((1, 2), "train_step returned (1, 2)"),
        ([1], "train_step returned [1]"),
    ],
)
def test_a_step_must_return_a_state_and_stats(result, message):
    (found,) = train_sums(step=lambda _: result)
    assert isinstance(found, TypeError)
    assert message in str(found)


def test_worker_stats_must_be_a_worker_stats_object_or_none():
    (found,) = train_sums(step=lambda state: (state, 5))
    assert str(found) == "worker_stats: got 5, expected a WorkerStats or None"


def run_sum(coordinator, steps):
    return run_train(coordinator, steps, Sum(coordinator, 10))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (lambda _: 3, "train_step_gen returned 3, expected a generator"),
        (lambda _: iter([3]), "train_step_gen yielded 3, expected (state, worker_stats)"),
        (7, "train_step_gen: got 7, expected a generator function"),
    ],
)
def test_a_generator_must_yield_a_state_and_stats(steps, message):
    (found,) = Job(1).run(lambda _, coordinator: run_sum(coordinator, steps))
    assert isinstance(found, TypeError)
    assert str(found) == message


def test_arguments_of_train_are_type_checked():
    def work(name, coordinator):
        state = Sum(coordinator, 1)
        with pytest.raises(TypeError, match="coordinator: got 1, expected a Coordinator"):
            train(1, add, state)
        with pytest.raises(TypeError, match="state: got 1, expected a State"):
            train(coordinator, add, 1)
        with pytest.raises(TypeError, match="train_step: got None, expected a function"):
            train(coordinator, None, state)

    assert Job(1).run(work) == [None]


class MakesLoaders(Sum):
    """A state whose sync fails when no data are left, like a data sampler that cannot start at the end."""

    def sync(self, world_size, rank):
        super().sync(world_size, rank)
        if self.steps == 10:
            raise ValueError("no data are left")


def test_torchelastic_programs_skip_the_last_sync_if_all_data_end_together(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchelastic", elasticrs.train)
    assert train_sums(3, state=MakesLoaders) == [DONE] * 3


def test_torchelastic_programs_skip_the_last_sync_if_only_one_sees_the_end(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchelastic", elasticrs.train)

    def step(state):
        result = add(state)
        # Rank 0 tries to take another step. The others leave the round without trying.
        state.coordinator.wants_to_meet = state.steps == 10 and state.coordinator.rank != 0
        return result

    assert train_sums(3, step=step, state=MakesLoaders) == [DONE] * 3


@pytest.mark.parametrize(
    ("ends", "is_together"),
    [
        ([(7, 5, True)], True),
        ([(7, 5, True), (7, 5, True)], True),
        ([(7, 5, False), (7, 5, True)], True),
        ([(7, 5, False), (7, 5, False)], False),
        ([(7, 5, True), (7, 6, True)], False),
        ([(7, 5, True), (8, 5, True)], False),
        ([(7, 5, True), (7, 0, True)], False),
        ([(7, 0, True), (7, 0, True)], False),
    ],
)
def test_have_ended_together_requires_the_same_round_and_step(ends, is_together):
    votes = [
        state_machine.Vote(False, True, at_the_end, 1, last_round=last, next_step=step)
        for last, step, at_the_end in ends
    ]
    assert state_machine.have_ended_together(votes) is is_together


def test_a_sync_that_always_fails_reaches_max_failures():
    class Broken(Sum):
        def sync(self, world_size, rank):
            if rank == 0:
                raise RuntimeError("cannot sync")
            super().sync(world_size, rank)

    for error in train_sums(2, state=Broken, max_failures=3):
        assert "failures: 3 " in str(error)


FORKS = """
import os, sys
sys.path[:0] = sys.argv[1:]
from train.threads import Job, ThreadCoordinator, add, train_sum
from elasticrs.train import NonRetryableException

def step(state):
    if state.steps == 3:
        os.fork()
    return add(state)

coordinator = ThreadCoordinator(Job(1), 0)
try:
    print(train_sum(coordinator, step=step), flush=True)
except NonRetryableException as error:
    os.write(1, f"{error}\\n".encode())
    os._exit(7 if coordinator.calls == coordinator.errors == [] else 1)
print("exit", os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_child_forked_in_a_step_does_not_count_as_a_worker(pytestconfig):
    done = run_program(
        [sys.executable, "-c", FORKS, str(pytestconfig.rootpath / "tests")], env=clean_environment()
    )
    assert sorted(done.stdout.splitlines())[:2] == ["(10, 550)", "exit 7"], done.stderr
    assert "forked" in done.stdout


# --- what is measured ---


class Kept(metrics.MetricHandler):
    def __init__(self):
        self.names = []

    def emit(self, metric_data):
        self.names.append(metric_data.name)


def test_metrics_are_published_to_a_handler():
    kept = Kept()
    metrics.configure(kept, "torchelastic")
    try:
        train_sums(length=2)
    finally:
        metrics.configure(metrics.NullMetricHandler(), "torchelastic")
    assert kept.names.count("train_step.duration.ms") == 2
    assert kept.names.count("state_sync.duration.ms") == 2
    assert {"outer_train_loop.duration.ms", "inner_train_loop.duration.ms"} <= set(kept.names)
    assert kept.names.count("ThreadCoordinator.should_rendezvous.success") == 2
    assert "ThreadCoordinator.rendezvous_barrier.duration.ms" in kept.names
