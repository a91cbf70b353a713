"""Child processes that a program forks while elasticrs waits handle their own signals."""

import multiprocessing
import os
import signal
import sys
import threading

import pytest
from helpers import functions, procs

from elasticrs._engine.job.config import START_METHODS
from elasticrs._engine.workers.functions.supervised_group import SupervisedGroup
from elasticrs.multiprocessing import DefaultLogsSpecs, start_processes

TIMES = 20

HOST = """
import multiprocessing, os, signal, sys, threading
from elasticrs import LaunchConfig, elastic_launch
from elasticrs.agent.server import LocalElasticAgent

if sys.argv[1] == "hooks":
    # Torch's loop, as a hook is replaced.
    plain = LocalElasticAgent._get_worker_state
    LocalElasticAgent._get_worker_state = lambda self, *how: plain(self, *how)

def begin(writer):
    os.write(writer, b"x")
    signal.pause()

def fork_and_terminate(is_to_begin):
    reader, writer = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=begin, args=(writer,))
    child.start()
    if is_to_begin:
        os.read(reader, 1)
    child.terminate()
    child.join()
    os.close(reader)
    os.close(writer)
    return child.exitcode

def be_beside():
    with open("runs") as runs:
        runs.read()
    codes = {fork_and_terminate(is_to_begin) for is_to_begin in [True, False] * TIMES}
    print("CODES", *codes, flush=True)
    with open("ends", "w"):
        pass

if __name__ == "__main__":
    os.mkfifo("runs")
    os.mkfifo("ends")
    thread = threading.Thread(target=be_beside, daemon=True)
    thread.start()
    config = LaunchConfig(1, 1, 1, rdzv_backend="c10d", run_id="job", max_restarts=0, monitor_interval=0.05)
    print("RESULT", elastic_launch(config, "sh")("-c", ": > runs; read x < ends; true"), flush=True)
    thread.join()
"""


@pytest.mark.parametrize("loop", ["events", "hooks"])
def test_terminating_a_forked_child_does_not_stop_the_agent(launch, loop):
    launched = launch("-c", HOST.replace("TIMES", str(TIMES)), loop, argv=[sys.executable]).exits(0)
    assert launched.stdout.splitlines() == ["CODES -15", "RESULT {0: None}"]


def code_of_a_terminated_child() -> int | None:
    child = multiprocessing.get_context("fork").Process(target=functions.wait_for_signal)
    child.start()
    child.terminate()
    child.join(procs.HANG)
    code = child.exitcode
    child.kill()
    child.join()
    child.close()
    return code


def test_terminating_a_forked_child_does_not_end_the_wait_of_the_main_thread():
    context = start_processes("x", "sleep", {0: ("1000",)}, {0: {}}, DefaultLogsSpecs(os.devnull))
    codes: list[int | None] = []

    def be_beside() -> None:
        try:
            codes.extend(code_of_a_terminated_child() for _ in range(TIMES))
        finally:
            os.kill(context.pids()[0], signal.SIGKILL)

    thread = threading.Thread(target=be_beside)
    thread.start()
    result = context.wait()
    thread.join()
    assert result is not None
    assert result.failures[0].exitcode == -signal.SIGKILL
    assert codes == [-signal.SIGTERM] * TIMES


def test_a_forked_child_that_is_terminated_at_once_dies_by_sigterm():
    context = start_processes("x", "sleep", {0: ("1000",)}, {0: {}}, DefaultLogsSpecs(os.devnull))
    try:
        for _ in range(TIMES):
            assert code_of_a_terminated_child() == -signal.SIGTERM
    finally:
        context.close()


@pytest.mark.parametrize("method", START_METHODS)
def test_a_worker_that_starts_its_own_processes_still_handles_sigterm(method):
    specs = DefaultLogsSpecs(os.devnull)
    function = functions.be_signalled_beside_a_context
    context = start_processes("x", function, {0: ()}, {0: {}}, specs, start_method=method)
    result = context.wait()
    assert result is not None
    assert result.return_values == {0: "raised"}


def test_a_wait_times_out_although_a_descriptor_is_always_ready():
    reader, writer = os.pipe()
    os.write(writer, b"x")
    group = SupervisedGroup()
    try:
        group.watch_fd(reader)
        assert not group.wait_until(lambda: False, 0.0)
        group.wait(0.0)
        group.unwatch_fd(reader)
    finally:
        group.close()
        os.close(reader)
        os.close(writer)
