"""The command that checks whether a node can run workers."""

import os
import signal
import subprocess
import sys

import pytest
from helpers import procs

from elasticrs._engine.gpus import node_check
from elasticrs._engine.gpus.node_check import MAX_LINE, MAX_LINES, NodeCheck
from elasticrs._engine.job.config import HealthSource


def command(*words):
    return HealthSource("the node check", tuple(words))


def run(*words, timeout=30.0):
    (result,) = NodeCheck([command(*words)], timeout).finish()
    return result


def test_a_check_command_that_succeeds_finds_the_node_fit():
    result = run("sh", "-c", "echo fine")
    assert (result.unfit, result.problem, result.lines) == (None, None, ("fine",))


@pytest.mark.parametrize("how", ["kill -9 $$", "kill -TERM $$", "sh -c 'kill -9 $$'"])
def test_a_check_command_that_is_killed_by_another_process_is_inconclusive(how):
    result = run("sh", "-c", f"echo out; {how}; exit $?")
    assert (result.unfit, result.lines[0]) == (None, "out")
    assert result.problem is not None


@pytest.mark.parametrize(("how", "word"), [("exit 3", "3"), ("kill -SEGV $$", "SIGSEGV")])
def test_a_check_command_that_fails_finds_the_node_unfit(how, word):
    result = run("sh", "-c", f"echo out; echo err >&2; {how}")
    assert word in result.unfit
    assert (result.problem, result.lines) == (None, ("out", "err"))


@pytest.fixture
def run_hanging(tmp_path, monkeypatch):
    """Return a function that runs a shell script with a time limit of 0.1 s, which starts when the script has
    written its pid to the FIFO in `$0`. The function returns the result and the pid.
    """
    os.mkfifo(fifo := tmp_path / "pid")
    watch, pids = node_check._watch, []

    def watch_when_it_runs(*arguments):
        pids.append(int(fifo.read_text()))
        return watch(*arguments)

    monkeypatch.setattr(node_check, "_watch", watch_when_it_runs)
    return lambda script: (run("sh", "-c", script, fifo, timeout=0.1), pids[0])


def test_a_check_command_that_hangs_is_killed_and_inconclusive(run_hanging):
    result, pid = run_hanging('echo here; echo $$ >"$0"; sleep 600')
    assert result.unfit is None
    assert "0.1 s" in result.problem
    assert result.lines == ("here",)
    assert procs.wait_gone(pid)


def test_a_cancelled_check_command_is_inconclusive():
    check = NodeCheck([command("sleep", "600")] * 2, 600.0)
    check.cancel()
    for result in check.finish():
        assert result.unfit is None
        assert result.problem is not None


def test_a_missing_check_command_is_inconclusive():
    result = run("/no/such/command")
    assert result.unfit is None
    assert os.strerror(2) in result.problem


def test_a_leftover_process_that_holds_output_open_is_killed_without_delay(tmp_path):
    result = run("sh", "-c", 'sleep 600 & echo $! >"$0"; exit 0', tmp_path / "pid")
    assert (result.unfit, result.problem) == (None, None)
    assert procs.wait_gone(int((tmp_path / "pid").read_text()))


def refuse(*_):
    raise PermissionError(1, os.strerror(1))


def test_the_result_of_a_check_command_run_as_another_user_is_used(monkeypatch):
    # As under sudo, the agent has no permission to signal the command, even after the command has exited.
    monkeypatch.setattr(node_check.os, "killpg", refuse)
    result = run("sh", "-c", "echo GPU 3 is broken; exit 3")
    assert "3" in result.unfit
    assert (result.problem, result.lines) == (None, ("GPU 3 is broken",))


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_check_command_that_cannot_be_killed_does_not_block_the_agent(monkeypatch, run_hanging):
    monkeypatch.setattr(node_check.os, "killpg", refuse)
    monkeypatch.setattr(node_check, "EXIT_LIMIT", 0.01)
    result, pid = run_hanging('echo $$ >"$0"; exec sleep 600')
    assert result.unfit is None
    assert result.problem.endswith(f"0.1 s, and process {pid} cannot be killed")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_check_command_does_not_outlive_a_killed_agent(tmp_path):
    program = """
import sys
from elasticrs._engine.gpus import node_check
from elasticrs._engine.job.config import HealthSource

watch = node_check._watch

def tell(*arguments):
    print("watching", flush=True)
    return watch(*arguments)

node_check._watch = tell
script = "sleep 600 & echo $$ $! >$0; wait"
source = HealthSource("the node check", ("sh", "-c", script, sys.argv[1]))
node_check.NodeCheck([source], 600.0).finish()
"""
    os.mkfifo(pids := tmp_path / "pids")
    with subprocess.Popen([sys.executable, "-c", program, pids], stdout=subprocess.PIPE) as agent:
        started = [int(word) for word in pids.read_text(encoding="ascii").split()]
        assert agent.stdout.readline() == b"watching\n"
        agent.kill()
    procs.assert_gone(started)
    procs.reap_adopted()


def test_only_the_end_of_a_huge_command_output_is_kept():
    result = run(sys.executable, "-c", "for n in range(200_000): print(n)")
    assert result.lines == tuple(str(200_000 - MAX_LINES + n) for n in range(MAX_LINES))


def test_a_check_command_starts_without_blocked_signals():
    result = run("sh", "-c", "grep SigBlk /proc/self/status")
    assert int(result.lines[0].split()[1], 16) == 0


def test_a_long_output_line_is_cut():
    result = run(sys.executable, "-c", "print('x' * 50_000)")
    assert result.lines == ("x" * MAX_LINE + "…",)


def test_checks_run_concurrently_and_each_has_its_own_result(tmp_path):
    for name in "ab":
        os.mkfifo(tmp_path / name)
    # The commands wait for each other, because opening a FIFO blocks until the other end is opened.
    waits = [command("sh", "-c", f"{how}; exit {code}") for how, code in (("cat a", 0), ("echo x >a", 3))]
    sources = [command("sh", "-c", f"cd {tmp_path}; {each.words[2]}") for each in waits]
    fit, unfit = NodeCheck(sources, 30.0).finish()
    assert (fit.unfit, fit.lines) == (None, ("x",))
    assert "3" in unfit.unfit
