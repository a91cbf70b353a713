"""All nodes draw the same conclusion from a failure, based on the evidence from all of them."""

import signal

import pytest

pytestmark = [pytest.mark.privileged, pytest.mark.beyond_torchrun, pytest.mark.timeout(150)]

VERDICT = ("--exit-codes", "verdict")

MARKED = """
import os, signal
from elasticrs.errors import NonRetryable
if os.environ["RANK"] == "1":
    raise NonRetryable("no")
signal.pause()
"""
MISSING = "import there_is_no_such_module\n"
MISSING_ON_NODE2 = """
import os, signal
if os.uname().nodename == "node2":
    import there_is_no_such_module
signal.pause()
"""
SAME_AGAIN = """
import os, signal
if os.environ["RANK"] == "1":
    raise ValueError("no")
signal.pause()
"""


@pytest.mark.parametrize(
    ("script", "max_restarts", "unreached"),
    [
        (MARKED, 3, "round 2 starts"),
        # Allow three rounds, because the first node that fails can stop the others before they fail in the
        # same way.
        (MISSING, 9, "round 4 starts"),
    ],
    ids=["marked", "missing module"],
)
def test_a_permanent_failure_ends_the_job_on_all_nodes(
    hosts, multinode, worker_script, script, max_restarts, unreached
):
    machines = hosts(3)
    job = multinode(machines[0], "3", *VERDICT, max_restarts=max_restarts, script=worker_script(script))
    agents = job.start(*machines)
    assert job.ended() == [93, 93, 93], job.story("another exit code")
    for agent in agents:
        assert unreached not in agent.launched.stderr, job.story("too many restarts")
    job.assert_empty()


def test_a_module_that_one_node_lacks_is_tried_again_until_the_failure_repeats(
    hosts, multinode, worker_script
):
    machines = hosts(2)
    job = multinode(machines[0], "2", *VERDICT, max_restarts=9, script=worker_script(MISSING_ON_NODE2))
    agents = job.start(*machines)
    assert job.ended() == [93, 93], job.story("another exit code")
    for agent in agents:
        assert "round 3 starts" in agent.launched.stderr, job.story("no second restart")
        assert "round 4 starts" not in agent.launched.stderr, job.story("a third restart")
        assert "ModuleNotFoundError at worker.py" in agent.launched.stderr, job.story("no reason")
    job.assert_empty()


def test_a_failure_that_repeats_ends_the_job_on_all_nodes(hosts, multinode, worker_script):
    machines = hosts(2)
    options = (*VERDICT, "--max-same-failures", "2", "--restart-delay", "1")
    job = multinode(machines[0], "2", *options, max_restarts=9, script=worker_script(SAME_AGAIN))
    agents = job.start(*machines)
    assert job.ended() == [93, 93], job.story("another exit code")
    texts = [agent.launched.stderr for agent in agents]
    assert all("the same ValueError at worker.py" in text for text in texts), job.story("no reason")
    assert all("(restart delay)" in text for text in texts), job.story("no delay")
    job.assert_empty()


def test_a_signal_during_a_restart_delay_does_not_hide_the_charge(hosts, multinode, worker_script):
    machines = hosts(2)
    options = ("--restart-delay", "1h", "--drain", "job")
    job = multinode(machines[0], "2", *options, script=worker_script(SAME_AGAIN))
    agents = job.start(*machines)
    for agent in agents:
        job.line(agent, r"\(restart delay\)")
    agents[1].signal(signal.SIGTERM)
    assert job.ended() == [1, 1], job.story("other exit codes")
    for agent in agents:
        assert "1 of 3 restarts charged" in agent.launched.stderr, job.story("another number")
    job.assert_empty()


def test_an_unfit_node_leaves_and_the_others_continue(hosts, multinode, worker_script):
    machines = hosts(2)
    script = """
        import os, sys
        sys.exit(3 if os.uname().nodename == "node2" else 0)
    """
    job = multinode(machines[0], "1:2", *VERDICT, script=worker_script(script))
    check = "sh -c 'test ! -e checked || exit 7; touch checked'"
    (first,) = job.start(machines[0])
    (second,) = job.start(machines[1], options=("--node-check", check))
    assert job.ended() == [0, 193], job.story("other exit codes")
    assert "code 7" in second.launched.stderr, job.story("no reason")
    assert "round 2 starts with 1 node" in first.launched.stderr, job.story("no round without it")
    job.assert_empty()


def test_nodes_with_other_exit_codes_are_refused(hosts, multinode, worker_script):
    machines = hosts(2)
    job = multinode(machines[0], "2", script=worker_script(SAME_AGAIN))
    first, second = (
        job.start(machine, options=("--fatal-exit-codes", codes))[0]
        for machine, codes in zip(machines, ("3", "4"), strict=True)
    )
    texts = lambda: first.launched.stderr + second.launched.stderr  # noqa: E731 -- read again at each call
    job.until(lambda: "fatal_exit_codes" in texts() or None, "a refusal")
    for agent in (first, second):
        agent.signal(signal.SIGTERM)
    job.ended()
    job.assert_empty()
