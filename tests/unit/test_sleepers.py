"""Tests for uninterruptible sleep: the decisions, the parser, and real processes in this state."""

import os
import signal
import subprocess
import sys

import pytest
from helpers import procs
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.process.other_processes import read_state
from elasticrs._engine.supervise.run.sleepers import Sleepers, overdue, since

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
