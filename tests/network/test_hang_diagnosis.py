"""Hang diagnosis with each node on its own host: it names the nodes, and reports a dead node."""

import re

import pytest
from helpers.said import says

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.beyond_torchrun,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(150),
]

SCRIPT = """
import os, threading
import torch
from torch import distributed
from elasticrs.timer import heartbeat
rank, number = int(os.environ["RANK"]), int(os.environ["ELASTICRS_ROUND"])
distributed.init_process_group("gloo")
ones = torch.ones(4)
def load_batch():
    threading.Event().wait()
distributed.all_reduce(ones)
heartbeat(7)
if number == 1:
    print("stuck", rank, flush=True)
    load_batch() if rank == 1 else distributed.all_reduce(ones)
distributed.destroy_process_group()
"""
DIAGNOSIS = re.compile(r"round 1 hung: (.*)")


def test_the_other_nodes_name_a_dead_node_in_the_hang_diagnosis(hosts, multinode, worker_script):
    machines = hosts(3)
    script = worker_script(SCRIPT)
    job = multinode(machines[0], "2:3", "--hang-timeout=2", max_restarts=1, script=script)
    agents = job.start(*machines)
    for agent in agents:
        job.line(agent, r"stuck (\d)")
    # The other nodes notice the loss only when the node's lease expires, and the hang timeout is shorter.
    machines[2].power_off()
    assert job.ended(*agents[:2]) == [0, 0], job.story("another exit code")
    (told,) = {tuple(DIAGNOSIS.findall(agent.launched.stderr)) for agent in agents[:2]}
    (paragraph,) = told
    says(paragraph, "all_reduce #2 of the default group", "(node3)", "the node did not answer")
    job.assert_empty()
