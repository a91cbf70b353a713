"""End of jobs on several nodes: error reports, the restart budget, and agents that may exit early."""

import json
import signal
import sys

import pytest
from helpers import procs
from helpers.nodes import PORT, pids
from helpers.said import line_with, says

pytestmark = [pytest.mark.privileged, pytest.mark.beyond_torchrun, pytest.mark.timeout(150)]

KILL, FAIL, SUCCEED = signal.SIGKILL, signal.SIGUSR2, signal.SIGUSR1

RAISES = """
import os, signal
if os.environ["RANK"] == "1":
    raise ValueError("no such sample: 17")
signal.pause()
"""

WAIT_FOR_KEY = """
import sys
from elasticrs import _core
client = _core.CoordinationClient(sys.argv[1], int(sys.argv[2]), run_id="job")
is_there = False
while not is_there:
    client.wait(None)
    for event in client.take():
        if isinstance(event, _core.ConnectionLost):
            sys.exit(event.message)
        if isinstance(event, _core.Connected):
            client.watch(1, sys.argv[3], exact=True, snapshot=True)
        else:
            is_there |= bool(event.results if isinstance(event, _core.Reply) else event.changes)
client.close()
"""


def on(agent, workers):
    return [worker for worker in workers if worker.host == agent.host.name]


# --- error reports and restart counts ---


def test_every_agent_reports_the_error_of_the_worker_that_failed_first(
    hosts, multinode, worker_script, tmp_path
):
    machines = hosts(3)
    job = multinode(machines[0], "3", max_restarts=1, script=worker_script(RAISES))
    files = {machine: tmp_path / f"{machine.name}.json" for machine in machines}
    agents = [
        agent
        for machine, path in files.items()
        for agent in job.start(machine, env={"TORCHELASTIC_ERROR_FILE": str(path)})
    ]
    assert job.ended() == [1, 1, 1]
    for path in files.values():
        assert "no such sample: 17" in json.loads(path.read_text())["message"]["message"], job.story(
            "no cause"
        )
    for agent in agents:
        said = agent.launched.stderr
        assert said.count("Root Cause") == 1, job.story("no report")
        root = said.partition("Root Cause")[2]
        for text in ("host      : node2", "rank      : 1 (local_rank: 0)", "exitcode  : 1 (pid: "):
            assert text in root, job.story(f"{text!r} is not in the report of {agent}")
        assert "ValueError: no such sample: 17" in root, job.story("no traceback")
        for number in (1, 2):
            line_with(said, "rank 1 ", "node2", "stopping", f"round {number}")
        line_with(said, "round 2 starts", "1 of 1")
        # The stop does not wait for the text of the error. If the text comes later, the next line has it.
        assert "ValueError: no such sample: 17 (worker.py:" in said.partition("attempt 1 is running")[0]
    job.assert_empty()


# --- success ---


def test_killing_an_agent_after_its_workers_finished_does_not_fail_the_job(formed):
    job, agents, workers = formed(2)
    job.tell(on(agents[1], workers), SUCCEED)
    store = agents[0].host
    store.run(sys.executable, "-c", WAIT_FOR_KEY, store.address, PORT, "/elasticrs/job/done/1/1")
    agents[1].signal(KILL)
    job.assert_empty(agents[1].host)
    job.finish(agents[:1], on(agents[0], workers))


def test_a_late_node_learns_of_the_success_while_the_store_host_waits(formed):
    job, agents, workers = formed(2)
    job.tell(on(agents[1], workers), SUCCEED)
    store = agents[0].host
    store.run(sys.executable, "-c", WAIT_FOR_KEY, store.address, PORT, "/elasticrs/job/done/1/1")
    # Stop this agent before it can read the job's outcome, so that the host of the store keeps waiting for
    # it.
    agents[1].signal(signal.SIGSTOP)
    job.tell(on(agents[0], workers), SUCCEED)
    (late,) = job.start(agents[1].host)
    assert job.ended(late) == [1]
    # The second text appears if the agent joined before the job was closed, and waited as a spare.
    outcomes = "job job is closed: succeeded at 20", "succeeded without this node, by another launch on this"
    assert any(text in late.launched.stderr for text in outcomes), job.story("no outcome")
    assert late.workers() == []
    agents[1].signal(signal.SIGCONT)
    job.ended()
    assert agents[0].launched.wait() == 0, job.story("the host has not succeeded")
    job.assert_empty()


def test_a_finished_node_exits_after_the_exit_barrier_timeout(formed):
    job, agents, workers = formed(2, "--exit-barrier-timeout", "1")
    job.tell(on(agents[1], workers), SUCCEED)
    assert job.ended(agents[1]) == [0]
    says(agents[1].launched.stderr, "this node", "other nodes")
    job.assert_empty(agents[1].host)
    # The other node is unaffected.
    job.finish(agents[:1], on(agents[0], workers))


def test_a_spare_node_reports_that_it_waits_until_the_job_ends(hosts, multinode):
    first, second, third = hosts(3)
    job = multinode(first, "2")
    workers = job.formed(*job.start(first, second))
    # The last agent runs on the machine of `second`, but was started in another session. It was probably not
    # meant as a spare, so it fails.
    waiting = [spare] = job.start(third)
    waiting += job.start(second)
    for each in waiting:
        job.line(each, r"spare.* round 1 .* 2 nodes")
    job.tell(workers, SUCCEED)
    assert job.ended() == [0, 0, 0, 1]
    says(spare.launched.stderr, "succeeded without")
    job.assert_empty()


# --- signals ---


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_to_all_agents_ends_the_job(formed, signum):
    job, agents, workers = formed(2)
    # Signal all agents at the same time. An agent that first learns from another agent that the job is ending
    # does not report its own signal.
    for agent in agents:
        agent.signal(signal.SIGSTOP)
        procs.wait_state(agent.pid, "T")
    for agent in agents:
        agent.signal(signum)
    for agent in agents:
        agent.signal(signal.SIGCONT)
    assert job.ended() == [1, 1]
    procs.assert_gone(pids(workers))
    for agent in agents:
        lines = [line for line in agent.launched.stderr.splitlines() if " received: " in line]
        assert len(lines) == 1, job.story("told never, or twice")
    job.assert_empty()


@pytest.mark.parametrize("which", [0, 1], ids=["host", "other node"])
def test_a_second_signal_ends_an_agent_without_waiting_for_its_workers(formed, which):
    job, agents, workers = formed(2, "--shutdown-timeout", "1000", env={"STUBBORN": "1"})
    agents[which].signal(signal.SIGTERM)
    job.line(agents[which], r"^IGNORED 15")
    agents[which].launched.insist(signal.SIGTERM)
    assert job.ended(agents[which]) == [1]
    procs.assert_gone(pids(on(agents[which], workers)))
    job.assert_empty(agents[which].host)
    if which == 0:  # the store exited with this agent, so the other agent kills its workers at once
        procs.assert_gone(pids(workers))
    agents[1 - which].launched.insist(signal.SIGTERM)
    assert job.ended() == [1, 1]
    job.assert_empty()


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 1.0])
def test_a_signal_ends_agents_that_wait_for_nodes(hosts, multinode, seconds):
    first, second = hosts(2)
    job = multinode(first, "3")
    agents = job.start(second, first)
    agents[0].launched.read_for(seconds)
    for agent in agents:
        agent.signal(signal.SIGTERM)
    codes = job.ended()
    # An agent that gets the signal before Python installs a handler is killed by it, which is fine.
    assert set(codes) <= {1, -signal.SIGTERM}, job.story(f"exit codes {codes}")
    assert not any("Traceback" in agent.launched.stderr for agent in agents), job.story("a traceback")
    job.assert_empty()
