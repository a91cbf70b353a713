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


class Training:
    """A job that runs `tests/workers/steps.py`."""

    def __init__(self, multinode, machines, nnodes, *options):
        self.job = multinode(machines[0], nnodes, *options, script=STEPS, conf=QUICK)
        self.agents = self.job.start(*machines)

    def steps(self, world):
        """Return the steps that jobs with ``world`` workers have printed so far."""
        printed = "".join(agent.launched.stdout for agent in self.job.agents)
        return [int(step) for step in re.findall(rf"^step (\d+) world {world}$", printed, re.MULTILINE)]

    def goes_on(self, world, beyond=0):
        """Wait for three new steps later than ``beyond`` with ``world`` workers, and return the
        last of them.
        """
        already = len(self.steps(world))

        def seen():
            fresh = [step for step in self.steps(world)[already:] if step > beyond]
            return fresh[-1] if len(fresh) >= 3 else None

        return self.job.until(seen, f"three steps with {world} workers", LONG)

    def workers(self, agent):
        """PIDs of the agent's workers that are still running."""
        told = re.findall(r"^TRAINING pid=(\d+)", agent.launched.stdout, re.MULTILINE)
        return [int(pid) for pid in told if agent.host.holds(int(pid))]

    def finish(self, agents):
        self.job.checkpoint.with_name("steps.stop").touch()
        codes = self.job.ended(*agents, timeout=LONG)
        assert not any(codes), self.job.story(f"exit codes {codes}")
        finished = "".join(agent.launched.stdout for agent in agents)
        assert len(re.findall(r"^FINISHED ", finished, re.MULTILINE)) == len(agents)
        self.job.assert_empty(*(agent.host for agent in agents))


def test_training_continues_after_an_agent_is_killed_and_replaced(network, multinode):
    net = network(3)
    training = Training(multinode, net.hosts, "3")
    step = training.goes_on(3)
    training.agents[1].signal(signal.SIGKILL)
    training.job.assert_empty(training.agents[1].host)
    agents = [training.agents[0], training.agents[2], *training.job.start(net.add_host())]
    training.goes_on(3, beyond=step)
    training.finish(agents)


def test_training_continues_when_a_node_joins_and_leaves(hosts, multinode):
    first, second, third = hosts(3)
    training = Training(multinode, (first, second), "2:3", "--warm=auto")
    step = training.goes_on(2)
    (added,) = training.job.start(third)
    step = training.goes_on(3, beyond=step)
    added.signal(signal.SIGTERM)
    training.goes_on(2, beyond=step)
    training.job.assert_empty(third)
    training.finish(training.agents)


def test_training_continues_with_lost_packets_and_a_killed_worker(hosts, multinode, impair):
    first, second = hosts(2)
    impair(second, seed=1, loss=0.02, duplicate=0.02, reorder=0.05, delay=0.002)
    training = Training(multinode, (first, second), "2")
    step = training.goes_on(2)
    (victim,) = training.workers(training.agents[1])
    second.kill(victim)
    training.goes_on(2, beyond=step)
    training.finish(training.agents)
