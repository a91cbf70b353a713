"""A worker waits at the start of a step for the signal of the agent, after its GPU has finished its work."""

import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from elasticrs._engine.inside import boundary
from elasticrs._engine.inside.boundary import _Boundary, _Stop
from elasticrs._engine.inside.keep.layout import Agreed, AgreedState


@pytest.fixture
def words():
    """The numbers in a worker's file that ask it to wait for SIGUSR1 after step 7."""
    words = boundary._private_words()
    words[Agreed.NUMBER], words[Agreed.STATE] = 3, AgreedState.ACT
    words[Agreed.STEP], words[Agreed.SIGNAL], words[Agreed.UNTIL] = 7, signal.SIGUSR1, 1 << 62
    return words


@pytest.fixture
def handled():
    """A list of the signals that the program's handlers have got."""
    found = []
    signums = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {each: signal.signal(each, lambda signum, _frame: found.append(signum)) for each in signums}
    yield found
    for signum, handler in before.items():
        signal.signal(signum, handler)


def when_ready(words, act):
    """Call ``act`` on another thread once the worker waits for its signal."""

    def wait():
        while words[Agreed.READY] != 3:
            os.sched_yield()
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_the_program_handles_the_signal_when_it_has_come(words, handled):
    handler = signal.getsignal(signal.SIGUSR1)
    thread = when_ready(words, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    _Boundary().reach(words, 7, is_start=True)
    thread.join()
    assert 0 < words[Agreed.READY_AT] <= time.monotonic_ns()
    assert handled == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is handler


@pytest.mark.parametrize("change", [(Agreed.STATE, AgreedState.NONE), (Agreed.NUMBER, 4), (Agreed.UNTIL, 0)])
def test_a_worker_goes_on_without_a_signal_if_the_agent_says_so(words, handled, change):
    thread = when_ready(words, lambda: words.__setitem__(*change))
    _Boundary().reach(words, 7, is_start=True)
    thread.join()
    assert handled == []


def test_a_worker_without_a_handler_goes_on_soon_after_the_signal_was_sent(words):
    words[Agreed.SIGNAL] = signal.SIGCHLD
    thread = when_ready(words, lambda: words.__setitem__(Agreed.SENT, 3))
    _Boundary().reach(words, 7, is_start=True)
    thread.join()


def test_a_worker_waits_for_a_signal_that_was_sent_even_if_the_agent_asks_again(words, handled):
    def send():
        words[Agreed.SENT], words[Agreed.NUMBER], words[Agreed.STATE] = 3, 4, AgreedState.WAIT
        # A worker that did not wait for the signal would go on now.
        signal.sigtimedwait([], 0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = when_ready(words, send)
    _Boundary().reach(words, 7, is_start=True)
    assert handled == [signal.SIGUSR1]
    thread.join()


def test_a_worker_does_not_wait_at_other_steps_nor_twice(words, handled):
    one = _Boundary()
    one.reach(words, 6, is_start=True)
    assert (words[Agreed.READY], words[Agreed.MISSED]) == (0, 0)
    one.reach(words, 8, is_start=True)
    assert (words[Agreed.READY], words[Agreed.MISSED]) == (0, 3)
    one.reach(words, 7, is_start=True)
    assert (words[Agreed.READY], handled) == (0, [])


def test_a_worker_gives_up_a_choice_that_is_not_made(words, monkeypatch):
    monkeypatch.setattr(boundary, "_CHOICE_LIMIT_NS", 1)
    words[Agreed.STATE] = AgreedState.WAIT
    _Boundary().reach(words, 7)
    assert words[Agreed.MISSED] == 3


def test_a_worker_tells_how_long_it_has_waited_for_the_choice(words):
    words[Agreed.STATE] = AgreedState.WAIT
    change = threading.Timer(0.01, words.__setitem__, (Agreed.STATE, AgreedState.NONE))
    change.start()
    _Boundary().reach(words, 7)
    change.join()
    assert words[Agreed.PAUSED] > 0


class Optimizers:
    """Stands in for the module with torch's optimizers."""

    def __init__(self):
        self.Optimizer = type("Optimizer", (), {"zero_grad": lambda _self: None})

    def register_optimizer_step_post_hook(self, hook):
        self.on_step = hook


@pytest.fixture
def counted(words, monkeypatch, handled):
    """A stand-in for torch's module of optimizers. The number of their steps is written into ``words``."""
    torch = SimpleNamespace(
        compiler=SimpleNamespace(is_compiling=bool), cuda=SimpleNamespace(is_initialized=bool)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("ELASTICRS_KEEP", "a file")
    monkeypatch.setattr(boundary, "_map_words", lambda: words)
    monkeypatch.setattr(boundary, "_calls", None)
    monkeypatch.setattr(boundary, "_boundary", None)
    words[Agreed.STATE] = AgreedState.NONE
    optimizers = Optimizers()
    boundary.follow_steps(optimizers, None)
    return optimizers


def test_only_the_steps_of_the_first_optimizer_count(words, counted):
    first, second = Optimizers(), Optimizers()
    for optimizer in (first, second, first, second, first):
        counted.on_step(optimizer, (), {})
    assert words[Agreed.STEPS] == 3
    del first, optimizer
    counted.on_step(second, (), {})
    assert words[Agreed.STEPS] == 4


def test_a_program_that_asks_in_each_step_names_the_steps_itself(words, counted):
    optimizer = Optimizers()
    for _ in range(3):
        counted.on_step(optimizer, (), {})
    for _ in range(100):
        counted.on_step(optimizer, (), {})
        assert boundary.checkpoint_requested() == ""
    assert words[Agreed.STEPS] == 100


def test_zero_grad_counts_until_a_step_of_an_optimizer_is_seen(words, counted):
    kind = counted.Optimizer
    first, second, original = kind(), kind(), kind.zero_grad.__wrapped__
    for _ in range(4):
        first.zero_grad()
    assert words[Agreed.STEPS] == 3
    counted.on_step(second, (), {})
    assert (words[Agreed.STEPS], kind.zero_grad) == (1, original)


def test_zero_grad_of_several_optimizers_without_data_loaders_does_not_count(words, counted):
    first, second = counted.Optimizer(), counted.Optimizer()
    for optimizer in (first, first, second, first, second, first):
        optimizer.zero_grad()
    assert words[Agreed.STEPS] == 0


@pytest.mark.parametrize("is_after_batch", [True, False])
def test_after_zero_grad_the_next_step_begins_when_a_batch_is_taken(
    words, counted, monkeypatch, is_after_batch
):
    kind = type("_BaseDataLoaderIter", (), {"__next__": lambda _self: None})
    monkeypatch.setitem(sys.modules, "torch.utils.data.dataloader", SimpleNamespace(_BaseDataLoaderIter=kind))
    loader, optimizers = kind(), [counted.Optimizer() for _ in range(2)]
    words[Agreed.STEP], words[Agreed.UNTIL] = 3, 0
    words[Agreed.STATE] = AgreedState.ACT
    parts = [lambda: next(loader), *[each.zero_grad for each in optimizers]]
    places = []
    for step in range(1, 7):
        for number, part in enumerate(parts if is_after_batch else parts[1:] + parts[:1]):
            part()
            if words[Agreed.READY] and not places:
                places.append((step, number))
    # The third step ends at the fourth call of zero_grad, because the first call may come before any step.
    assert places == [(5, 0) if is_after_batch else (4, 2)]
    assert words[Agreed.MISSED] == 0


def test_heartbeats_with_a_step_number_count_until_a_step_of_an_optimizer_is_seen(words, counted):
    ended = []
    beat = boundary.follow_heartbeats(lambda: ended.append(True))
    optimizer = counted.Optimizer()
    for _ in range(4):
        beat()
        optimizer.zero_grad()
    assert (words[Agreed.STEPS], ended) == (3, [])
    counted.on_step(optimizer, (), {})
    assert (words[Agreed.STEPS], ended) == (1, [True])
    assert boundary.follow_heartbeats(lambda: None) is None


def test_heartbeats_of_another_thread_do_not_count(words, counted):
    beat = boundary.follow_heartbeats(lambda: None)
    thread = threading.Thread(target=lambda: [beat() for _ in range(4)])
    thread.start()
    thread.join()
    assert words[Agreed.STEPS] == 0


@pytest.mark.parametrize("is_initialized", [True, False])
def test_a_gpu_is_synchronized_before_the_worker_says_that_it_is_ready(words, monkeypatch, is_initialized):
    seen = []
    cuda = SimpleNamespace(
        is_initialized=lambda: is_initialized, synchronize=lambda: seen.append(words[Agreed.READY])
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    words[Agreed.UNTIL] = 0
    _Stop(words, 3).wait()
    assert seen == [0] * is_initialized
    assert words[Agreed.READY] == 3
