"""Exclusion of unfit nodes from a job: which node leaves, which node replaces it, and when no node is
excluded.
"""

import pytest
from helpers.nodes import FAIL

pytestmark = [pytest.mark.privileged, pytest.mark.beyond_torchrun, pytest.mark.timeout(150)]

CHECK = "sh -c 'test ! -e $(uname -n).bad || { echo row remap failure; exit 7; }'"
"""A node is unfit if the test has created a file with its name."""
OPTIONS = ("--exit-codes", "verdict", "--node-check", CHECK)
EXCLUDED = "is excluded from the job"
KEPT = "may be unfit, but is not excluded"


@pytest.fixture
def with_spare(hosts, multinode):
    """Return a function that starts a job of two nodes and a spare. It returns the job, its agents, and the
    workers of the first round.
    """

    def make(*options, **how):
        machines = hosts(3)
        job = multinode(machines[0], "2", *options, **how)
        agents = job.start(*machines[:2])
        workers = job.formed(*agents)
        agents += job.start(machines[2])
        job.line(agents[2], "spare")
        return job, agents, workers

    return make


def texts(job):
    return [agent.launched.stderr for agent in job.agents]


@pytest.mark.parametrize("failing", ["node1", "node2"])
def test_a_spare_replaces_an_unfit_node_wherever_the_failure_was(with_spare, tmp_path, failing):
    job, (first, unfit, spare), workers = with_spare(*OPTIONS)
    (tmp_path / "node2.bad").touch()
    job.tell([worker for worker in workers if worker.host == failing], FAIL)
    again = job.formed(first, spare, restarts=1)
    assert job.ended(unfit) == [193], job.story("another exit code")
    assert "node check: row remap failure" in unfit.launched.stderr
    for text in texts(job):
        assert text.count(EXCLUDED) == 1, job.story("not said once")
    job.assert_empty(unfit.host)
    job.finish((first, spare), again)


def test_an_unfit_node_that_is_needed_stays_and_exits_with_code_193(formed, tmp_path):
    job, (first, second), workers = formed(2, *OPTIONS, max_restarts=1)
    (tmp_path / "node2.bad").touch()
    job.tell(workers[1:], FAIL)
    job.tell(job.formed(first, second)[1:], FAIL)
    assert job.ended() == [1, 193], job.story("other exit codes")
    for text in texts(job):
        assert text.count(f"node2 {KEPT} (without it, fewer than 2 nodes") == 1, job.story("not said once")


@pytest.mark.parametrize("succeeds", [True, False])
def test_an_unfit_node_that_hosts_the_store_stays_without_workers(formed, tmp_path, succeeds):
    job, (host, *others), workers = formed(3, *OPTIONS, nnodes="2:3", max_restarts=2)
    (tmp_path / "node1.bad").touch()
    job.tell(workers[:1], FAIL)
    again = job.formed(*others)
    assert "hosts the store" in host.launched.stderr
    for text in texts(job):
        assert text.count(EXCLUDED) == 1, job.story("not said once")
    job.tell(again[:1], FAIL)
    again = job.formed(*others)
    if succeeds:
        job.finish((host, *others), again)
    else:
        job.tell(again[:1], FAIL)
        assert job.ended() == [193, 1, 1], job.story("other exit codes")


def test_no_more_nodes_are_excluded_than_allowed(formed, tmp_path):
    job, agents, workers = formed(3, *OPTIONS, "--max-excluded-nodes", "1", nnodes="1:3")
    for name, kept in (("node3", agents[:2]), ("node2", agents[:2])):
        (tmp_path / f"{name}.bad").touch()
        job.tell(workers[1:2], FAIL)
        workers = job.formed(*kept)
    assert f"node2 {KEPT} (max_excluded_nodes=1, 1 excluded so far)" in agents[0].launched.stderr
    job.finish(agents[:2], workers)


def test_a_node_that_alone_lacks_a_module_is_excluded_after_two_failures(hosts, multinode, worker_script):
    script = """
        import os, signal
        if os.uname().nodename == "node2":
            import there_is_no_such_module
        elif os.environ["WORLD_SIZE"] == "2":
            signal.pause()
    """
    machines = hosts(2)
    job = multinode(machines[0], "1:2", "--exit-codes", "verdict", script=worker_script(script))
    first, _ = job.start(*machines)
    assert job.ended() == [0, 193], job.story("other exit codes")
    assert "round 3 starts with 1 node (restart 2 of 3)" in first.launched.stderr
    for text in texts(job):
        assert "ModuleNotFoundError at worker.py" in text, job.story("no reason")
        assert text.count(KEPT) == 1, job.story("not said once")
    job.assert_empty()


def test_a_node_that_alone_cannot_run_the_program_is_excluded_after_two_tries(hosts, multinode, tmp_path):
    good, broken = tmp_path / "good", tmp_path / "broken"
    good.write_text("#!/bin/sh\ntest $WORLD_SIZE = 1 || exec sleep 600\n")
    broken.write_text("#!/no/such/mount/python\n")
    for program in (good, broken):
        program.chmod(0o755)
    machines = hosts(2)
    conf = {"same_command": 0}
    job = multinode(machines[0], "1:2", "--exit-codes", "verdict", "--no-python", script=good, conf=conf)
    (first,) = job.start(machines[0])
    job.script = broken
    job.start(machines[1])
    assert job.ended() == [0, 193], job.story("other exit codes")
    assert "round 3 starts with 1 node (restart 2 of 3)" in first.launched.stderr
    for text in texts(job):
        assert "/no/such/mount/python" in text or "broken" in text, job.story("no reason")
    job.assert_empty()
