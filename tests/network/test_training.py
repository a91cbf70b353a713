"""Real training with gloo on hosts that fail: no step is lost, and the training finishes."""

import re
import signal

import pytest
from helpers.nodes import QUICK, STEPS
from helpers.procs import HANG

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.beyond_torchrun,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

LONG = 3 * HANG


def three_steps(job, beyond=0):
    """Wait for three new steps later than ``beyond`` with three workers, and return the last of them."""

    def steps():
        printed = "".join(agent.launched.stdout for agent in job.agents)
        return [int(step) for step in re.findall(r"^step (\d+) world 3$", printed, re.MULTILINE)]

    already = len(steps())

    def seen():
        fresh = [step for step in steps()[already:] if step > beyond]
        return fresh[-1] if len(fresh) >= 3 else None

    return job.until(seen, "three steps with 3 workers", LONG)


def test_training_continues_after_an_agent_is_killed_and_replaced(network, multinode):
    net = network(3)
    job = multinode(net.hosts[0], "3", script=STEPS, conf=QUICK)
    first, lost, third = job.start(*net.hosts)
    step = three_steps(job)
    lost.signal(signal.SIGKILL)
    job.assert_empty(lost.host)
    agents = [first, third, *job.start(net.add_host())]
    three_steps(job, beyond=step)
    job.checkpoint.with_name("steps.stop").touch()
    codes = job.ended(*agents, timeout=LONG)
    assert not any(codes), job.story(f"exit codes {codes}")
    finished = "".join(agent.launched.stdout for agent in agents)
    assert len(re.findall(r"^FINISHED ", finished, re.MULTILINE)) == len(agents)
    job.assert_empty(*(agent.host for agent in agents))
