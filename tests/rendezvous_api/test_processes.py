"""Polling agents in separate processes that meet through a user's back end, a file."""

import os
import signal
import sys
from pathlib import Path

import pytest
from helpers import procs
from helpers.polled import polled_nodes

AGENT = '''
import logging, os, select, signal, subprocess, sys
sys.path[:0] = [{tests!r}]
from rendezvous_api.backends import FileBackend
from elasticrs.agent.server import RunResult, SimpleElasticAgent, WorkerSpec, WorkerState
from elasticrs.rendezvous import RendezvousParameters, rendezvous_handler_registry
from elasticrs.rendezvous.dynamic_rendezvous import create_handler
from elasticrs.store.file_store import FileStore
from elasticrs.rendezvous.registry import get_rendezvous_handler

logging.basicConfig(level=logging.INFO)
NAME, FOLDER, NODES, BACKEND = sys.argv[1:5]

class Agent(SimpleElasticAgent):
    """Its worker reads a line and exits with the number in it."""

    process = None

    def _start_workers(self, group):
        command = [sys.executable, "-S", "-c", "raise SystemExit(int(input()))"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE)
        place = f"{{group.group_rank}}/{{group.group_world_size}} {{group.workers[0].global_rank}}"
        print(f"ROUND {{place}} {{group.master_addr}} {{group.master_port}}", flush=True)
        return {{0: self.process.pid}}

    def _stop_workers(self, group):
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def _monitor_workers(self, group):
        if select.select([0], [], [], 0)[0]:
            self.process.communicate(os.read(0, 1) + b"\\n")
        code = self.process.poll()
        if code is None:
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.FAILED if code else WorkerState.SUCCEEDED)

    def _shutdown(self, death_sig=signal.SIGTERM, timeout=30):
        self._stop_workers(None)

def make(parameters):
    return create_handler(FileStore(FOLDER + "/store"), FileBackend(FOLDER + "/state"), parameters)

rendezvous_handler_registry.register("mine", make)
low, high = map(int, NODES.split(":"))
extra = {{"store_type": "file"}} if BACKEND == "c10d" else {{}}
handler = get_rendezvous_handler(RendezvousParameters(
    BACKEND, FOLDER + "/c10d" if extra else "", "job", low, high, NAME, last_call_timeout="0.3",
    keep_alive_interval=0.2, keep_alive_max_attempt=5, join_timeout=40, **extra,
))
spec = WorkerSpec("trainer", 1, handler, entrypoint="-", max_restarts=1, monitor_interval=0.05)
agent = Agent(spec, exit_barrier_timeout=20)
try:
    print("RESULT", agent.run().state.value, flush=True)
finally:
    print("SHUT", handler.shutdown(), handler.is_closed(), flush=True)
'''


@pytest.fixture(params=["mine", "c10d"])
def node(launch, tmp_path, request):
    program = tmp_path / "agent.py"
    tests = os.fspath(Path(__file__).parent.parent)
    program.write_text(AGENT.format(tests=tests), encoding="utf-8")
    with polled_nodes(launch) as start:
        yield lambda name, nodes: start([sys.executable, program, name, str(tmp_path), nodes, request.param])


def round_of(node):
    """Return rank and size, global rank, and address of the workers' store for the next round that the node
    reports.
    """
    return node.round().split()


def round_with(node, size):
    """Return the next round with ``size`` nodes."""
    while not (told := round_of(node))[0].endswith(f"/{size}"):
        pass
    return told


def test_a_killed_agent_is_noticed_and_the_others_continue(node):
    names = ["node2", "node10", "node9"]
    nodes = [node(name, "2:3") for name in names]
    told = [round_with(each, 3) for each in nodes]
    # Node ranks follow the order of the names, with numbers compared as numbers. Global ranks are the same,
    # because each node has one worker.
    assert [each[:2] for each in told] == [["0/3", "0"], ["2/3", "2"], ["1/3", "1"]]
    assert {tuple(each[2:]) for each in told} == {("node2", told[0][3])}
    first, *others = nodes
    first.launched.signal(signal.SIGKILL)
    first.launched.wait()
    procs.reap_adopted(keep=[each.launched.pid for each in others])
    again = [round_with(each, 2) for each in others]
    assert [each[:3] for each in again] == [["1/2", "1", "node9"], ["0/2", "0", "node9"]]
    assert again[0][3] == again[1][3] != told[0][3]
    for each in others:
        each.workers_exit(0)
    assert [each.result() for each in others] == ["SUCCEEDED"] * 2


def test_a_failed_worker_restarts_all_agents_even_finished_ones(node):
    first, second = node("a", "2:2"), node("b", "2:2")
    before = round_of(first), round_of(second)
    first.workers_exit(0)
    second.workers_exit(1)
    after = round_of(first), round_of(second)
    assert [each[:2] for each in after] == [each[:2] for each in before] == [["0/2", "0"], ["1/2", "1"]]
    assert after[0][3] == after[1][3] != before[0][3]
    for each in (first, second):
        each.workers_exit(0)
    assert [each.result() for each in (first, second)] == ["SUCCEEDED"] * 2


def test_a_newcomer_is_let_in(node):
    first = node("a", "1:2")
    assert round_of(first)[0] == "0/1"
    second = node("b", "1:2")
    assert (round_with(first, 2)[0], round_with(second, 2)[0]) == ("0/2", "1/2")
    for each in (first, second):
        each.workers_exit(0)
    assert [each.result() for each in (first, second)] == ["SUCCEEDED"] * 2
