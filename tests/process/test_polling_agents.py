"""Polling agents, written for torch's base class, on several nodes of one job with real processes.

Some tests run with two kinds of rendezvous handlers: the handler of elasticrs, and torch's own handler with a
back end that the user has written.
"""

import signal
import subprocess
import sys

import pytest
from helpers import ports, procs

AGENT = '''
import logging, os, signal, subprocess, sys
from elasticrs.agent.server import RunResult, SimpleElasticAgent, WorkerSpec, WorkerState
from elasticrs.rendezvous import RendezvousClosedError, RendezvousParameters
from elasticrs.rendezvous.registry import get_rendezvous_handler

logging.basicConfig(level=logging.INFO)
NODE, ENDPOINT, NODES, KIND = int(sys.argv[1]), *sys.argv[2:4], sys.argv[5]

class Agent(SimpleElasticAgent):
    """Its workers are programs that read a line and exit with the number in it."""

    processes = {}

    def _start_workers(self, group):
        place = f"{group.group_rank}/{group.group_world_size} {group.master_addr}"
        lines = " | ".join(f"{place} {worker}" for worker in group.workers)
        print(f"ROUND left={self._remaining_restarts} port={group.master_port} {lines}", flush=True)
        command = [sys.executable, "-c", "exit(int(input()))"]
        self.processes = {
            worker.local_rank: subprocess.Popen(command, stdin=subprocess.PIPE)
            for worker in group.workers
        }
        for process in self.processes.values():
            print(f"WORKER {process.pid}", flush=True)
        return {rank: process.pid for rank, process in self.processes.items()}

    def _stop_workers(self, group):
        for process in self.processes.values():
            process.kill()
            process.communicate()
        self.processes = {}

    def _monitor_workers(self, group):
        # What the test wants of the worker comes over our own stdin.
        import select
        if select.select([0], [], [], 0)[0]:
            code = os.read(0, 1).decode()
            for process in self.processes.values():
                process.communicate(code.encode() + b"\\n")
        codes = [process.poll() for process in self.processes.values()]
        if any(codes):
            return RunResult(WorkerState.FAILED)
        return RunResult(WorkerState.SUCCEEDED if None not in codes else WorkerState.HEALTHY)

    def _shutdown(self, death_sig=signal.SIGTERM, timeout=30):
        self._stop_workers(None)

low, high = map(int, NODES.split(":"))
if KIND == "store":
    parameters = RendezvousParameters(
        "c10d", ENDPOINT, "job", low, high, order_hint=NODE, is_host=NODE == 0, last_call_timeout=0.2,
        scale_up_delay=0.1, close_timeout=10,
    )
else:
    parameters = RendezvousParameters(
        "mine", "", "job", low, high, f"127.0.0.{1 + NODE}", last_call_timeout=1,
    )
if KIND == "mine":
    # Let torch's handler publish a new store in each round. The shared one is published in the first round
    # only, so a node that joins later would never learn its address.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    import fcntl
    from torch.distributed import FileStore
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

    class FileBackend(RendezvousBackend):
        """A back end in a locked file whose first line is the version."""

        name = "mine"

        def __init__(self, path):
            self._path = path

        def _locked(self, change=None):
            with open(self._path, "a+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                version, _, state = file.read().partition(b"\\n")
                if change is not None and (new := change(int(version or 0))):
                    os.ftruncate(file.fileno(), 0)
                    file.write(new)
                    version, _, state = new.partition(b"\\n")
                return (state, int(version)) if version else None

        def get_state(self):
            return self._locked()

        def set_state(self, state, token=None):
            written = []

            def change(version):
                if version != (token or 0):
                    return None
                written.append(True)
                return b"%d\\n%s" % (version + 1, state)

            found = self._locked(change)
            return None if found is None else (*found, bool(written))

    handler = create_handler(FileStore("store", -1), FileBackend("state"), parameters)
else:
    handler = get_rendezvous_handler(parameters)
spec = WorkerSpec("trainer", int(sys.argv[4]), handler, entrypoint="-", max_restarts=1, monitor_interval=0.05)
agent = Agent(spec, exit_barrier_timeout=20)
try:
    print("RESULT", agent.run().state.value, flush=True)
except RendezvousClosedError:
    print("RESULT closed", flush=True)
finally:
    print("SHUT", handler.shutdown(), handler.is_closed(), flush=True)
'''


class PolledNode:
    """A node whose agent polls its workers.

    It prints ``ROUND …`` for each round, and ``RESULT …`` and ``SHUT …`` as its last lines.
    """

    def __init__(self, launched):
        self.launched = launched
        self._rounds = 0

    def round(self):
        """Wait for the next round, and return what the node prints about it."""
        self._rounds += 1
        return self.launched.wait_for_lines(r"^ROUND (.*)$", self._rounds)[-1][1]

    def workers_exit(self, code):
        """Make the current workers exit with this code of one digit."""
        self.launched.feed(str(code).encode())

    def result(self):
        """Wait until the node exits, and return the result of its agent. Its rendezvous handler must have
        been shut down.
        """
        assert self.launched.wait() == 0, self.launched.stderr
        *_, result, shut = self.launched.stdout.splitlines()
        assert shut == "SHUT True True", self.launched.stderr
        return result.removeprefix("RESULT ")


@pytest.fixture
def kind(request):
    """Kind of rendezvous that the nodes use."""
    return getattr(request, "param", "store")


KINDS = pytest.mark.parametrize(
    "kind", ["store", pytest.param("mine", marks=pytest.mark.torch)], indirect=True
)


@pytest.fixture
def node(launch, launch_with_torch, tmp_path, kind):
    start_program = launch_with_torch if kind == "mine" else launch
    program, endpoint = tmp_path / "agent.py", f"127.0.0.1:{ports.free()}"
    program.write_text(AGENT, encoding="utf-8")

    def start(number, nodes="2:2", nproc=1, env=None):
        argv = [sys.executable, program, str(number), endpoint, nodes, str(nproc), kind]
        return PolledNode(start_program(argv=argv, stdin=subprocess.PIPE, env=env))

    return start


def ranks(told):
    """Return the group rank and size, and for each worker its local, global and role rank and both world
    sizes.
    """
    workers = told.split(" ", 2)[2].split(" | ")
    return [each.split()[0] for each in workers], [
        tuple(int(field.split("=")[1]) for field in each.split()[2].split(",")) for each in workers
    ]


def left(told):
    return told.split()[0]


def port(told):
    return told.split()[1]


def round_with(node, size):
    while f"/{size} " not in (told := node.round()):
        pass
    return told


def test_polling_agents_agree_on_ranks_and_finish(node):
    first, second = node(0, nproc=2), node(1, nproc=1)
    one, other = first.round(), second.round()
    assert ranks(one) == (["0/2", "0/2"], [(0, 0, 0, 3, 3), (1, 1, 1, 3, 3)])
    assert ranks(other) == (["1/2"], [(0, 2, 2, 3, 3)])
    assert port(one) == port(other)
    first.workers_exit(0)
    # The first agent waits in the exit barrier for the other one.
    assert not first.launched.has_exited
    second.workers_exit(0)
    assert (first.result(), second.result()) == ("SUCCEEDED", "SUCCEEDED")


def test_agents_with_identical_workers_get_the_right_ranks(node):
    identical = {"TORCH_ELASTIC_WORKER_IDENTICAL": "1"}
    started = [node(number, nproc=2, env=identical) for number in (0, 1)]
    assert ranks(started[0].round())[1] == [(0, 0, 0, 4, 4), (1, 1, 1, 4, 4)]
    assert ranks(started[1].round())[1] == [(0, 2, 2, 4, 4), (1, 3, 3, 4, 4)]
    for each in started:
        each.workers_exit(0)
    assert [each.result() for each in started] == ["SUCCEEDED", "SUCCEEDED"]


@KINDS
def test_a_new_node_costs_no_restart_and_a_failure_restarts_all_nodes_on_another_port(node):
    first = node(0, "1:3")
    assert ranks(first.round())[0] == ["0/1"]
    second = node(1, "1:3")
    # On a busy machine, the first node may form more rounds alone before the other one joins.
    before = round_with(first, 2)
    assert (ranks(before)[0], left(before)) == (["0/2"], "left=1")
    assert ranks(round_with(second, 2))[0] == ["1/2"]
    second.workers_exit(3)
    again, other = round_with(first, 2), round_with(second, 2)
    # Only the node whose workers failed has used a restart, as in torch.
    assert (left(again), left(other)) == ("left=1", "left=0")
    assert port(again) == port(other) != port(before)
    for each in (first, second):
        each.workers_exit(0)
    assert [each.result() for each in (first, second)] == ["SUCCEEDED", "SUCCEEDED"]


def test_a_finished_node_restarts_if_another_node_fails(node):
    first, second = node(0), node(1)
    first.round()
    second.round()
    first.workers_exit(0)
    second.workers_exit(3)
    assert left(first.round()) == "left=1"
    second.round()
    for each in (first, second):
        each.workers_exit(0)
    assert [each.result() for each in (first, second)] == ["SUCCEEDED", "SUCCEEDED"]


def test_the_remaining_nodes_start_a_new_round_after_a_node_is_lost(node):
    nodes = [node(number, "2:3") for number in range(3)]
    before = [round_with(each, 3) for each in nodes]
    assert [ranks(told)[0] for told in before] == [["0/3"], ["1/3"], ["2/3"]]
    # The first node hosts the store.
    lost = nodes.pop(1)
    lost.launched.signal(signal.SIGKILL)
    lost.launched.wait()
    # The orphaned worker exits when its standard input is closed.
    procs.reap_adopted(keep=[each.launched.pid for each in nodes])
    again = [round_with(each, 2) for each in nodes]
    assert [ranks(told)[0] for told in again] == [["0/2"], ["1/2"]]
    assert port(again[0]) == port(again[1]) != port(before[0])
    for each in nodes:
        each.workers_exit(0)
    assert [each.result() for each in nodes] == ["SUCCEEDED"] * 2


def test_a_failing_node_without_restarts_left_ends_the_job(node):
    first, second = node(0), node(1)
    for _ in range(2):
        first.round()
        second.round()
        second.workers_exit(3)
    assert (second.result(), first.result()) == ("FAILED", "closed")


def test_a_spare_node_succeeds_when_the_job_succeeds(node):
    first = node(0, "1:1")
    first.round()
    second = node(1, "1:1")
    second.launched.wait_for_line("spare")
    first.workers_exit(0)
    assert (first.result(), second.result()) == ("SUCCEEDED", "SUCCEEDED")
