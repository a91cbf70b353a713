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
MISSING = """
import os, signal
# In each attempt, another rank fails first. The others are stopped before they fail in the same way.
if int(os.environ["RANK"]) != int(os.environ["ELASTICRS_ROUND"]) - 1:
    signal.pause()
import there_is_no_such_module
"""
SAME_AGAIN = """
import os, signal
if os.environ["RANK"] == "1":
    raise ValueError("no")
signal.pause()
"""
TWICE = ("--max-same-failures", "2", "--restart-delay", "1")


@pytest.mark.parametrize(
    ("count", "script", "options", "found", "unreached"),
    [
        (3, MARKED, (), (), "round 2 starts"),
        (3, MISSING, (), ("workers on nodes", "failed while the program started"), "round 3 starts"),
        (2, SAME_AGAIN, TWICE, ("the same ValueError at worker.py", "(restart delay)"), "round 3 starts"),
    ],
    ids=["marked", "missing module", "same failure"],
)
def test_a_permanent_failure_ends_the_job_on_all_nodes(
    hosts, multinode, worker_script, count, script, options, found, unreached
):
    machines = hosts(count)
    options = (*VERDICT, *options)
    job = multinode(machines[0], str(count), *options, max_restarts=9, script=worker_script(script))
    agents = job.start(*machines)
    assert job.ended() == [93] * count, job.story("another exit code")
    for agent in agents:
        for text in found:
            assert text in agent.launched.stderr, job.story(f"no {text!r}")
        assert unreached not in agent.launched.stderr, job.story("too many restarts")
    job.assert_empty()


def test_a_signal_during_a_restart_delay_still_reports_the_charged_restart(hosts, multinode, worker_script):
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
