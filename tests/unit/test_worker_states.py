"""Signals that the agent passes on, holds back or drops, and workers in uninterruptible sleep."""

import os
import signal
import subprocess
import sys

import pytest
from helpers import procs
from helpers.procs import wait_until
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.process.other_processes import read_state
from elasticrs._engine.supervise.run.worker_states import (
    PATIENCE,
    TICK,
    PassedSignals,
    Sleepers,
    can_take,
    overdue,
    since,
)

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture
def procs_that_wait():
    """Return a function that starts a process and returns its pid. The process waits for the given
    signals.
    """
    pids = []

    def start(signals: set[int]) -> int:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        pid = os.fork()
        if not pid:
            signal.sigwait(signals)
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        pids.append(pid)
        return pid

    yield start
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Node:
    """Simulated workers with signal handlers that the test sets. Records the signals sent to the workers."""

    def __init__(self) -> None:
        self.workers: dict[int, int] = {}
        self.handlers: set[tuple[int, int]] = set()
        self.seconds = 0.0
        self.sent: list[tuple[int, int]] = []
        self.lines: list[str] = []
        self.passed = PassedSignals(self._send, self.lines.append, self._can_take, lambda: self.seconds)

    def _can_take(self, pid: int, signum: int) -> bool:
        return (pid, signum) in self.handlers

    def _send(self, signum: int, local_ranks: list[int]) -> None:
        for rank in local_ranks:
            pid = self.workers[rank]
            assert (pid, signum) in self.handlers
            self.sent.append((pid, signum))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pass on"), st.sampled_from((USR1, USR2))),
        st.tuples(st.just("install"), st.sampled_from((USR1, USR2)), st.integers(0, 2)),
        st.tuples(st.just("remove"), st.sampled_from((USR1, USR2)), st.integers(0, 2)),
        st.tuples(st.just("replace"), st.integers(0, 2)),
        st.tuples(st.just("exit"), st.integers(0, 2)),
        st.tuples(st.just("wait"), st.sampled_from((TICK, PATIENCE + 1))),
    )
)


@given(STEPS)
def test_each_forwarded_signal_is_delivered_or_its_drop_is_logged(steps):
    node, pids = Node(), iter(range(100, 10_000))
    node.workers = {rank: next(pids) for rank in range(3)}
    asked: set[tuple[int, int]] = set()
    for what, *more in steps:
        if what == "pass on":
            asked |= {(pid, more[0]) for pid in node.workers.values()}
            node.passed.pass_on(more[0], node.workers)
        elif what in ("install", "remove") and more[1] in node.workers:
            change = node.handlers.add if what == "install" else node.handlers.discard
            change((node.workers[more[1]], more[0]))
        elif what == "replace":
            node.workers[more[0]] = next(pids)
        elif what == "exit":
            node.workers.pop(more[0], None)
        elif what == "wait":
            node.seconds += more[0]
            node.passed.look(node.workers)
    node.workers = {}
    assert node.passed.look(node.workers) is None
    dropped = sum("dropped" in line for line in node.lines)
    assert asked >= set(node.sent)
    assert bool(asked - set(node.sent)) <= bool(dropped)


def test_a_signal_forwarded_twice_while_held_back_is_delivered_once():
    node = Node()
    node.workers = {0: 100}
    node.passed.pass_on(USR1, node.workers)
    node.passed.pass_on(USR1, node.workers)
    assert node.passed.look(node.workers) == TICK
    node.handlers.add((100, USR1))
    node.passed.look(node.workers)
    assert node.sent == [(100, USR1)]


@pytest.mark.parametrize(
    ("handlers", "expected"),
    [
        ((0, 1, 2), "SIGUSR1 received: passing it on to the workers"),
        (
            (1,),
            "passing it on to local rank 1 only, because local ranks 0, 2 have no handler, and would die; ",
        ),
        ((), "not passing it on, because local ranks 0-2 have no handler, and would die; "),
    ],
)
def test_the_line_about_a_forwarded_signal_says_who_gets_it(handlers, expected):
    node = Node()
    node.workers = {rank: 100 + rank for rank in range(3)}
    node.handlers = {(100 + rank, USR1) for rank in handlers}
    held = node.passed.pass_on(USR1, node.workers)
    assert sorted({*held, *handlers}) == [0, 1, 2]
    assert [pid for pid, _ in node.sent] == [100 + rank for rank in handlers]
    assert expected in node.lines[0]


def test_can_take_detects_handled_ignored_and_blocked_signals():
    before = signal.getsignal(USR1)
    try:
        found = []
        for handler in (signal.SIG_DFL, signal.SIG_IGN, lambda *_: None):
            signal.signal(USR1, handler)
            found.append(can_take(os.getpid(), USR1))
        signal.signal(USR1, signal.SIG_DFL)
        for blocked in ({USR1}, signal.valid_signals()):
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
            found.append(can_take(os.getpid(), USR1))
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        signal.signal(USR1, before)
    assert found == [False, True, True, True, False]


def test_can_take_detects_signals_that_a_process_waits_for(procs_that_wait):
    pid = procs_that_wait({USR1, signal.SIGTERM})
    wait_until(lambda: can_take(pid, USR1))
    assert not can_take(pid, USR2)


def test_can_take_returns_none_for_an_exited_process():
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert can_take(pid, USR1) is None
    os.waitpid(pid, 0)
    assert can_take(pid, USR1) is None


PIDS = st.integers(1, 4)
LOOKS = st.lists(st.tuples(st.floats(0.01, 5), st.dictionaries(PIDS, st.sampled_from("RSDZ"))), max_size=20)


@given(LOOKS, st.floats(-1, 10))
def test_only_uninterrupted_time_in_d_state_counts(looks, limit):
    now, first_seen, streaks = 0.0, {}, {}
    for step, states in looks:
        now += step
        first_seen = since(first_seen, states, now)
        for pid in range(1, 5):
            if states.get(pid) == "D":
                streaks.setdefault(pid, now)
            else:
                streaks.pop(pid, None)
        expected = {pid: now - start for pid, start in streaks.items() if now - start >= limit}
        assert overdue(first_seen, now, limit) == (expected if limit > 0 else {})


@pytest.mark.parametrize("name", [b"(x)", b"(a) D (b", b"()", b"\xff\n) R"])
def test_the_process_state_is_read_for_any_process_name(tmp_path, name):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_bytes(b"7 (" + name + b") D 1 7 7 0\n")
    assert read_state(7, str(tmp_path)) == "D"


def test_a_missing_process_has_no_state():
    assert read_state(2**22 + 1) == ""
    assert read_state(os.getpid()) == "R"


def test_no_process_is_checked_without_a_time_limit(tmp_path):
    off = Sleepers(0, str(tmp_path))
    assert off.interval == float("inf")
    assert off.look({0: 7}) == {}


@pytest.fixture
def sleeper(tmp_path):
    """Start a process that waits in ``vfork`` for a blocked child and is therefore in state D."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    action = f"(os.POSIX_SPAWN_OPEN, 5, {str(fifo)!r}, os.O_RDONLY, 0)"
    program = (
        f"import os; print(flush=True); os.posix_spawn('/bin/true', ['true'], {{}}, file_actions=[{action}])"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, process_group=0)
    process.stdout.readline()
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    procs.reap_adopted()


def test_a_real_process_in_d_state_is_found(sleeper):
    while read_state(sleeper.pid) != "D":
        assert sleeper.poll() is None
    sleepers = Sleepers(1e-6)
    found = {}
    while not found:
        found = sleepers.look({3: sleeper.pid, 4: os.getpid()})
    assert list(found) == [3]
