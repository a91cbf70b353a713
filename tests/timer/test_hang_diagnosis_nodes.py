"""Hangs of real gloo groups on several nodes: every node prints the same diagnosis, based on the evidence of
all nodes.
"""

import re

import pytest
from helpers import timing_out
from helpers.nodes import LoopbackJob
from helpers.said import says

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SCRIPT = """
import os, threading
import torch
from torch import distributed
from elasticrs.timer import heartbeat
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
distributed.init_process_group("gloo")
ones = torch.ones(4)
def load_batch():
    threading.Event().wait()
def step():
    distributed.all_reduce(ones)
distributed.all_reduce(ones)
heartbeat(7)
if attempt == 0:
    {step}
distributed.destroy_process_group()
"""
DIAGNOSIS = re.compile(r"round (\d+) hung: (.*)")


def step(culprit, of_culprit):
    return SCRIPT.format(step=f"({of_culprit}) if rank == {culprit} else step()")


class Nodes(LoopbackJob):
    def exits(self, code):
        assert self.ended() == [code] * len(self.nodes), self.story

    @property
    def diagnosis(self):
        """The paragraph of the diagnosis, which must be the same on every node."""
        (told,) = {tuple(DIAGNOSIS.findall(node.stderr)) for node in self.nodes}
        assert len(told) == 1, self.story
        return told[0][1]


@pytest.fixture
def nodes(launch, worker_script, tmp_path):
    def nodes(source, count, nproc, *options, timeout=3):
        options = (f"--hang-timeout={timeout}", *options)
        job = Nodes(launch, tmp_path, count, nproc, *options, env={"OMP_NUM_THREADS": "1"})
        for _ in range(count):
            job.start(worker_script(source))
        return job

    return nodes


def test_all_nodes_name_the_same_faulty_rank(nodes):
    job = nodes(step(3, "load_batch()"), 2, 2, "--max-restarts=1")
    job.exits(0)
    says(job.diagnosis, "3 of 4 ranks wait in all_reduce #2 of the default group (worker.py:")
    says(job.diagnosis, "; rank 3 did not enter it: it is in wait (threading.py:", "called at worker.py:")


def test_the_report_of_a_failed_job_contains_the_diagnosis(nodes):
    job = nodes(step(0, "load_batch()"), 2, 1, "--max-restarts=0")
    job.exits(1)
    says_so = r"rank 1 waits in all_reduce #2 .*; rank 0 did not enter it: it is in .* at worker.py:\d+"
    for node in job.nodes:
        root = node.stderr[node.stderr.index("Root Cause") : node.stderr.index("Failures:")]
        assert "rank      : 0 (local_rank: 0)" in root, job.story
        assert re.search(f"note +: {says_so}", root), job.story
        assert re.search(f"failed after .*: rank 0 of 2.* hung: .*; {says_so}", node.stderr), job.story
    told = {re.search(says_so, node.stderr)[0] for node in job.nodes}
    assert len(told) == 1, job.story


def test_all_nodes_name_the_rank_that_made_a_collective_time_out(nodes):
    # A rank that exits more slowly has no diagnosis.
    job = nodes(timing_out.script(3), 2, 2, "--max-restarts=1", "--exit-timeout=60", timeout=600)
    job.exits(0)
    (told,) = {tuple(re.findall(r"round 1 failed: (.*)", node.stderr)) for node in job.nodes}
    (paragraph,) = told
    # The agent may have stopped the ranks of the other node before they could answer.
    says(paragraph, "in all_reduce #2 of the default group")
    assert re.search(r"rank 3|ranks 2, 3", paragraph), job.story
