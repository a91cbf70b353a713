"""Small parts: data shares, events, statistics, injected faults, and states."""

import os
import subprocess
import sys
from random import Random

import hypothesis.strategies as st
import pytest
from helpers.procs import run_program
from hypothesis import given

from elasticrs import train
from elasticrs._engine.inside.error_file import failure_facts
from elasticrs.train import (
    NonRetryableException,
    RetryableException,
    SimpleWorkerStats,
    State,
    data,
    event_logger,
    events,
    fault_injection,
)
from elasticrs.train.checkpoint import CheckpointError
from elasticrs.train.coordinator import CannotContinueError
from elasticrs.train.data import Shares
from elasticrs.train.rendezvous import RendezvousParameters, get_rendezvous
from elasticrs.train.state_machine import (
    AHEAD,
    AT_ONCE,
    LeaveStep,
    decode_leave_step,
    encode_leave_step,
    largest_cap,
)


@given(
    st.integers(0, 60),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=6),
    st.booleans(),
)
def test_no_sample_is_lost_or_repeated_when_workers_join_or_leave(size, batch, worlds, shuffle):
    seen, position = [], 0
    for place, (world, steps) in enumerate(worlds):
        ranks = [
            Shares(size, batch, world, rank, position, epoch=3, shuffle=shuffle, seed=1)
            for rank in range(world)
        ]
        assert len({len(each) for each in ranks}) == 1
        is_last = place == len(worlds) - 1
        for _ in range(len(ranks[0]) if is_last else min(steps, len(ranks[0]))):
            taken = [next(each) for each in ranks]
            seen += [index for share in taken for index in share]
            assert {each.after(position) for each in ranks} == {position + sum(map(len, taken))}
            position = ranks[0].after(position)
        if is_last:
            assert [list(each) for each in ranks] == [[]] * world
    assert sorted(seen) == list(range(size))


def test_the_sample_order_depends_on_epoch_and_seed():
    assert list(Shares(5, 2, 1, 0, shuffle=False)) == [[0, 1], [2, 3], [4]]
    orders = {str(list(Shares(20, 20, 1, 0, epoch=epoch, seed=seed))) for epoch in (0, 1) for seed in (0, 1)}
    assert len(orders) == 4
    assert list(Shares(20, 3, 1, 0, epoch=1)) == list(Shares(20, 3, 1, 0, epoch=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, 1, 2, 2), "rank: got 2, expected 0 to 1"),
        ((5, 0, 2, 1), "batch_size: got 0, expected at least 1"),
        ((5, 1, 2, 1, 6), "start: got 6, expected 0 to 5"),
    ],
)
def test_invalid_data_shares_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Shares(*arguments)


def test_the_data_helpers_of_torchelastic_are_available():
    from elasticrs.utils.data import CyclingIterator

    assert data.CyclingIterator is CyclingIterator
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        data.Other  # noqa: B018


@pytest.fixture
def told(monkeypatch):
    kept = []

    class Kept(event_logger.EventLogHandler):
        def log_event(self, event_name, message=None):
            kept.append((event_name, message))

    event_logger.configure(Kept())
    yield kept
    event_logger.configure(event_logger.NullEventLogHandler())


def test_events_go_to_the_handler_and_the_configured_destination(told, monkeypatch):
    recorded = []
    monkeypatch.setattr("elasticrs.events.record", lambda *arguments: recorded.append(arguments))
    monkeypatch.setenv("ELASTICRS_TRAIN_EVENTS", "console")
    events.record("rendezvous_succeeded", 2, world_size=4)
    ((name, message),) = told
    assert name == "rendezvous_succeeded"
    assert f'"pid": {os.getpid()}, "rank": 2, "world_size": 4' in message
    ((event, destination),) = recorded
    assert (event.name, event.source, event.metadata["rank"]) == (name, "WORKER", 2)
    assert destination == "console"


def test_events_are_not_logged_by_default(monkeypatch, capsys):
    monkeypatch.delenv("ELASTICRS_TRAIN_EVENTS", raising=False)
    events.record("rendezvous_started", -1)
    assert capsys.readouterr() == ("", "")
    event_logger.ConsoleEventLogHandler().log_event("x", "{}")
    assert capsys.readouterr().out == "event: x, message: {}\n"


def test_a_progress_rate_may_be_none():
    assert SimpleWorkerStats(4.5).get_progress_rate() == 4.5
    assert SimpleWorkerStats(None).get_progress_rate() is None


KILLED = """
import threading
from elasticrs.train.fault_injection import start_fault_injection_thread
start_fault_injection_thread(fault_injection_rate=1, interval_in_sec=0.001)
threading.Event().wait(60)
"""


def test_fault_injection_kills_a_worker():
    assert subprocess.run([sys.executable, "-c", KILLED], check=False, timeout=60).returncode == -9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.5, 1), "fault_injection_rate: got 1.5, expected 0 to 1"),
        ((1, 0), "interval_in_sec: got 0, expected more than 0"),
    ],
)
def test_invalid_fault_injection_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        fault_injection.start_fault_injection_thread(*arguments)


KEPT = """
import io, logging, os, sys
from fractions import Fraction
import torch

logging.basicConfig(format="%(message)s", stream=sys.stdout)
if sys.argv[1:] == ["old"]:
    import elasticrs.alias
    elasticrs.alias.activate()
    from torchelastic import State
else:
    from elasticrs.train import State

class Kept(State):
    def __init__(self, value=None):
        self.value = value

    def sync(self, *_):
        raise AssertionError("not called")

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, content):
        self.value = content["value"]

class OldKept(Kept):
    state_dict, load_state_dict = State.state_dict, State.load_state_dict
    capture_snapshot, apply_snapshot = Kept.state_dict, Kept.load_state_dict

def saved(state):
    stream = io.BytesIO()
    state.save(stream)
    stream.seek(0)
    return stream

def copy(state):
    loaded = type(state)()
    loaded.load(saved(state))
    return loaded.value
"""

SAVES = """
print(copy(Kept(4)))
if sys.argv[1] == "fraction":
    print(copy(Kept(Fraction(1, 3))))
try:
    print(copy(OldKept(5)))
except NotImplementedError as error:
    print(error)
Kept.state_dict = Kept.capture_snapshot
try:
    copy(Kept(4))
except TypeError as error:
    print(error)
"""

NOTHING = "the state Kept has nothing to save: its state_dict is None"


def test_states_are_saved_and_loaded(torch_programs):
    output = torch_programs.checked(KEPT + SAVES, "new")
    assert output.splitlines() == ["4", "OldKept has no state_dict", NOTHING]


@pytest.mark.torch
def test_states_of_an_old_program_are_saved_by_snapshots_as_in_torchelastic_0_1():
    # Do not fork a process that may have imported modules of torch's launcher, which the alias replaces.
    ended = run_program([sys.executable, "-c", KEPT + SAVES, "old"])
    assert (ended.returncode, ended.stdout.splitlines()) == (0, ["4", "5", NOTHING])


def test_a_state_that_needs_unpickling_is_loaded_with_a_warning(torch_programs):
    first, warning, second, *_ = torch_programs.checked(KEPT + SAVES, "fraction").splitlines()
    assert (first, second) == ("4", "1/3")
    assert "unpickled" in warning


LOADS_FROM_A_PEER = """
from elasticrs.train.state import load_from_peer

class Evil:
    def __reduce__(self):
        return os.mkdir, (sys.argv[1],)

state = Kept()
load_from_peer(state, saved(Kept(torch.ones(2))), is_protected=False)
print(state.value.tolist())
try:
    load_from_peer(state, saved(Kept(Evil())), is_protected=False)
except Exception as error:
    print(type(error).__name__, "ELASTICRS_TOKEN" in str(error), os.path.exists(sys.argv[1]))
load_from_peer(state, saved(Kept(Evil())), is_protected=True)
print(os.path.exists(sys.argv[1]))
"""


def test_a_state_of_a_peer_runs_code_only_if_the_store_needs_a_token(torch_programs, tmp_path):
    said = torch_programs.checked(KEPT + LOADS_FROM_A_PEER, str(tmp_path / "made")).splitlines()
    assert said[0] == "[1.0, 1.0]"
    assert "UnpicklingError True False" in said
    assert said[-1] == "True"


@pytest.mark.parametrize(
    ("error", "is_retryable"),
    [
        (NonRetryableException("x"), False),
        (CannotContinueError("x"), True),
        (CheckpointError("x"), True),
        (RetryableException("x"), True),
    ],
)
def test_the_launcher_does_not_retry_what_the_program_marks(error, is_retryable):
    assert failure_facts(error)["is_retryable"] == is_retryable


def test_rendezvous_parameters_are_combined_into_a_url():
    made = RendezvousParameters("elasticrs", "localhost:1234", "job", 2, 4, "last_call_timeout=5")
    assert made.url == "elasticrs://localhost:1234/job?min_workers=2&max_workers=4&last_call_timeout=5"
    handler = get_rendezvous(made)
    assert (handler.get_run_id(), handler.rendezvous.max_nodes) == ("job", 4)
    with pytest.raises(ValueError, match="got 3, 2, expected 0 < min_workers <= max_workers"):
        made.replaced(min_workers=3, max_workers=2)
    with pytest.raises(ValueError, match="config: got 'x', expected KEY=VALUE"):
        made.replaced(config="x").url  # noqa: B018


class Half(State):
    """A state that does not override ``apply_snapshot``."""

    def sync(self, *_):
        raise AssertionError("not called")


def test_a_state_with_snapshots_but_no_apply_snapshot_is_refused():
    assert Half().capture_snapshot() is None
    Half().apply_snapshot(None)
    with pytest.raises(NotImplementedError, match="Half has capture_snapshot, but no apply_snapshot"):
        Half().apply_snapshot(1)


OTHER_GPU = """
tag = torch.serialization.location_tag
# What a rank with another GPU would write: the name of that GPU as the place of the tensors.
torch.serialization.location_tag = lambda _storage: "cuda:3"
stream = saved(Kept(torch.ones(2)))
torch.serialization.location_tag = tag
loaded = Kept()
loaded.load(stream)
print(loaded.value.tolist(), loaded.value.device)
"""


def test_gpu_tensors_of_another_rank_are_loaded_on_a_device_of_this_rank(torch_programs):
    done = torch_programs.run(KEPT + OTHER_GPU)
    device = "cuda:0" if "cuda:0" in done.stdout else "cpu"
    assert done.stdout == f"[1.0, 1.0] {device}\n", done.stderr


def test_importing_elasticrs_train_does_not_import_torch():
    shown = "import sys, elasticrs.train; print('torch' in sys.modules)"
    done = run_program([sys.executable, "-c", shown], check=True)
    assert done.stdout == "False\n"


def test_each_submodule_is_loaded_on_first_use():
    for name in train._SUBMODULES:
        assert getattr(train, name).__name__ == f"elasticrs.train.{name}"


class Worker:
    """A simulated worker. Its main thread passes step boundaries. Its second thread learns at some
    moment that the workers must leave the round.
    """

    def __init__(self) -> None:
        self.step = LeaveStep()
        self.cap: int | None = None
        self.left: int | None = None

    def may_pass(self, others: list["Worker"], is_coupled: bool) -> bool:
        """Return false while this worker waits, either at its cap, or in a collective for another worker
        that is a step behind.
        """
        if self.left is not None or self.step.decision() == "wait":
            return False
        return not is_coupled or all(other.step.done >= self.step.done for other in others)

    def passes(self) -> None:
        self.step.done += 1
        if self.step.decision() == "leave":
            self.left = self.step.done


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
            leave.append(largest_cap(list(published.values())))
        else:
            # No worker has passed the leave step, so all of them can still leave there.
            assert worker.step.done <= leave[0]
            worker.step.at = leave[0]
            if worker.step.decision() == "leave":
                worker.left = worker.step.done
    assert [worker.left for worker in workers] == [leave[0]] * size


@given(at=st.integers(1, 2**60), saves=st.booleans())
def test_an_encoded_leave_step_decodes_to_the_same_value(at, saves):
    assert decode_leave_step(encode_leave_step(at, saves=saves)) == (at, saves)


def test_set_cap_keeps_the_first_cap():
    step = LeaveStep()
    assert step.set_cap() == AHEAD
    step.done = 1
    assert step.set_cap() == AHEAD


def test_a_broken_round_is_left_at_the_next_step_boundary():
    step = LeaveStep(done=3)
    assert step.decision() == "go"
    step.at = AT_ONCE
    assert step.decision() == "leave"
