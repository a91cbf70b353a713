"""Warm and cold workers have the same exit codes, output and failure reports, however they end."""

import sys

import pytest
from helpers.fidelity import ENDINGS, Job
from helpers.procs import run_program

pytestmark = pytest.mark.beyond_torchrun


@pytest.fixture(scope="module")
def counts():
    """Return the numbers of ways to fail and to succeed."""
    counted = run_program([sys.executable, ENDINGS, "count"], check=True)
    return tuple(map(int, counted.stdout.split()))


@pytest.fixture
def compare(launch, tmp_path):
    job = Job(launch, tmp_path, "json,colorsys")

    def run(*command, workers):
        outcome = job.compare(*command, argued={r"\d+\.\d/facts": "tells them apart"})
        assert outcome.code == 0
        assert len(outcome.workers) == workers
        are_warm = [worker.facts for worker in outcome.workers.values()]
        assert all(are_warm), outcome.stderr

    return run


def test_every_kind_of_failure_has_the_same_outcome_warm_and_cold(compare, counts):
    failures, _ = counts
    compare(f"--max-restarts={failures}", ENDINGS, "fail", workers=failures + 1)


def test_every_kind_of_success_has_the_same_outcome_warm_and_cold(compare, counts):
    _, successes = counts
    compare(f"--nproc-per-node={successes}", ENDINGS, "succeed", workers=successes)
