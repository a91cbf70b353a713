"""The helpers for jobs on several hosts, tested with the reference (torchrun) whatever `--launcher` says."""

import signal

import pytest
from helpers.launcher import LAUNCHERS
from helpers.nodes import STEPS

pytestmark = [pytest.mark.privileged, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def launch(launch):
    """Launch torchrun, the reference, whichever launcher is being tested."""

    def start(*args, **how):
        return launch(*args, **how, argv=LAUNCHERS["torchrun"])

    return start


def test_workers_report_their_ranks_and_obey_signals(hosts, multinode):
    first, second = hosts(2)
    job = multinode(first, "2", nproc=2)
    agents = job.start(first, second)
    workers = job.formed(*agents, timeout=60)
    assert {(each.groups, each.role_world, each.run) for each in workers} == {(2, 4, "job")}
    job.tell(workers, signal.SIGUSR1)
    assert job.ended() == [0, 0]
    job.assert_empty()


@pytest.mark.parametrize("is_ipv6_only", [False, True], ids=["IPv4", "IPv6"])
def test_a_process_group_of_gloo_trains_over_hosts(hosts, multinode, is_ipv6_only):
    first, second = hosts(2, is_ipv6_only=is_ipv6_only)
    job = multinode(first, "2", script=STEPS, env={"STEPS": "5"})
    agents = job.start(first, second)
    assert job.ended(timeout=90) == [0, 0], job.story("failed")
    printed = "".join(agent.launched.stdout for agent in agents)
    assert [f"step {step} world 2" for step in range(1, 6)] == [
        line for line in printed.splitlines() if line.startswith("step ")
    ]
    assert job.checkpoint.read_text(encoding="utf-8") == "5"
