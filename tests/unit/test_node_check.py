"""The command that checks whether a node can run workers."""

import os
import sys

import pytest
from helpers import procs

from elasticrs.host.node_check import MAX_LINES, NodeCheck


def run(*command, timeout=30.0):
    return NodeCheck(command, timeout).finish()


def test_a_command_that_succeeds_finds_the_node_fit():
    result = run("sh", "-c", "echo fine")
    assert (result.unfit, result.problem, result.lines) == (None, None, ("fine",))


@pytest.mark.parametrize(("how", "word"), [("exit 3", "3"), ("kill -9 $$", "SIGKILL")])
def test_a_command_that_fails_finds_the_node_unfit(how, word):
    result = run("sh", "-c", f"echo out; echo err >&2; {how}")
    assert word in result.unfit
    assert (result.problem, result.lines) == (None, ("out", "err"))


def test_a_command_that_hangs_proves_nothing_and_is_killed(tmp_path):
    script = 'echo $$ >"$0"; echo here; sleep 600'
    result = run("sh", "-c", script, tmp_path / "pid", timeout=0.5)
    assert result.unfit is None
    assert "0.5 s" in result.problem
    assert result.lines == ("here",)
    procs.wait_gone(int((tmp_path / "pid").read_text()))


def test_a_command_that_is_cancelled_proves_nothing():
    check = NodeCheck(("sleep", "600"), 600.0)
    check.cancel()
    result = check.finish()
    assert result.unfit is None
    assert result.problem is not None


def test_a_command_that_does_not_exist_proves_nothing():
    result = run("/no/such/command")
    assert result.unfit is None
    assert os.strerror(2) in result.problem


def test_a_process_that_keeps_the_output_open_delays_nothing_and_is_killed(tmp_path):
    result = run("sh", "-c", 'sleep 600 & echo $! >"$0"; exit 0', tmp_path / "pid")
    assert (result.unfit, result.problem) == (None, None)
    procs.wait_gone(int((tmp_path / "pid").read_text()))


def test_only_the_end_of_a_huge_output_is_kept():
    result = run(sys.executable, "-c", "for n in range(2_000_000): print(n)")
    assert result.lines == tuple(str(2_000_000 - MAX_LINES + n) for n in range(MAX_LINES))


def test_a_command_gets_signals_that_the_thread_blocks():
    result = run("sh", "-c", "grep SigBlk /proc/self/status")
    assert int(result.lines[0].split()[1], 16) == 0
