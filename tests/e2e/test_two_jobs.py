"""Independent jobs with the same endpoint never merge into one job, and a launcher never reports success for
workers that have not run.
"""

import os
import signal
import socket

import pytest
from helpers import ports, procs
from helpers.coordination import store_command
from helpers.launcher import Launched, clean_environment
from helpers.said import says

pytestmark = pytest.mark.beyond_torchrun

WAITS = """
    import os, signal, sys
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
    print("READY", os.getpid(), sys.argv[1], os.environ["RANK"], os.environ["WORLD_SIZE"], flush=True)
    while True:
        signal.pause()
    """


@pytest.fixture
def job(launch, worker_script):
    """Return a function that starts an agent. All agents have the same endpoint, which is port ``job.port``
    of this machine.
    """
    script, port = worker_script(WAITS), ports.free()

    def start(name, nnodes="1", same_command=1):
        where = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}")
        return launch(f"--nnodes={nnodes}", *where, f"--rdzv-conf=same_command={same_command}", script, name)

    start.port = port
    return start


def workers(agents, *names, world=1):
    """Wait until each of these agents has a worker in a round of ``world`` workers. Return the pids of the
    workers.
    """
    found = [
        agent.wait_for_line(rf"READY (\d+) {name} (\d+) {world}$", "stdout")
        for agent, name in zip(agents, names, strict=True)
    ]
    if world > 1:
        assert sorted(int(each[2]) for each in found) == list(range(world))
    return [int(each[1]) for each in found]


def finish(agents, pids):
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    for agent in agents:
        agent.exits(0)


@pytest.mark.parametrize("names", ["AA", "AB", "AAAA"])
def test_jobs_of_one_node_run_side_by_side(job, names):
    agents = [job(name) for name in names]
    pids = workers(agents, *names)
    assert sum(f":{job.port} is in use" in each.stderr for each in agents) == len(names) - 1
    finish(agents, pids)
    assert not any("refused" in each.stderr for each in agents)


def test_a_job_of_one_node_runs_beside_another_program_at_its_endpoint(job):
    with socket.create_server(("127.0.0.1", job.port)):
        only = job("A")
        finish([only], workers([only], "A"))


def test_an_agent_whose_command_differs_is_refused_at_once_and_the_other_one_reports_it(job):
    first = job("A", nnodes="2")
    first.wait_for_line("waiting for nodes")
    other = job("B", nnodes="2").exits(1)
    says(other.stderr, "argument 1 'B'", "'A'", "same_command")
    says(first.wait_for_line("refused.*").string, "'B'", "'A'", "--rdzv-id", "same_command")
    agents = [first, job("A", nnodes="2")]
    finish(agents, workers(agents, "A", "A", world=2))
    assert "READY" not in other.stdout


def test_a_second_run_of_several_nodes_does_not_succeed_without_having_run(job):
    first = [job("A", nnodes="2") for _ in range(2)]
    pids = workers(first, "A", "A", world=2)
    second = [job("A", nnodes="2") for _ in range(2)]
    for agent in second:
        says(agent.wait_for_line("another launch on this machine.*").string, "--rdzv-id")
        agent.wait_for_line("spare")
    finish(first, pids)
    for agent in second:
        says(agent.exits(1).stderr, "without this node")
        assert "READY" not in agent.stdout


def test_commands_may_differ_on_purpose(job):
    agents = [job(name, nnodes="2", same_command=0) for name in "AB"]
    finish(agents, workers(agents, "A", "B", world=2))


def test_the_second_job_of_one_node_fails_without_having_run_at_a_store_of_all_jobs(job, tmp_path):
    store = Launched(store_command(port=job.port), env=clean_environment(), cwd=tmp_path)
    procs.bystanders.add(store.pid)
    try:
        store.wait_for_line("serving at", "stdout")
        first = job("A")
        pids = workers([first], "A")
        spare = job("A")
        spare.wait_for_line("spare")
        says(job("B").exits(1).stderr, "argument 1 'B'")
        finish([first], pids)
        says(spare.exits(1).stderr, "without this node")
        assert "READY" not in spare.stdout
    finally:
        store.signal(signal.SIGTERM)
        store.wait()
        procs.bystanders.discard(store.pid)
        store.close()
