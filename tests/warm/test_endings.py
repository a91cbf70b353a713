"""Warm and cold workers have the same exit codes, output and failure reports, however they end."""

import pytest
from helpers.fidelity import ENDINGS, Job

pytestmark = pytest.mark.beyond_torchrun

COUNT = ENDINGS.read_text(encoding="utf-8").count("@ending\n")


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


def test_each_attempt_fails_in_a_way_of_its_own(compare):
    compare("--max-restarts", str(COUNT), ENDINGS, "fail", workers=COUNT + 1)


def test_each_rank_succeeds_in_a_way_of_its_own(compare):
    compare("--nproc-per-node=7", ENDINGS, "succeed", workers=7)
