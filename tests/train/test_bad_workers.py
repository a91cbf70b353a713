"""Workers that do what they must not, on real processes: one clear error, and nobody waits for ever."""

import pytest

from .test_acceptance import FIXED, FLEXIBLE, NAMES, ends, start

pytestmark = [pytest.mark.torch]


def test_a_sync_that_never_returns_costs_its_worker_only(trainers):
    job = trainers(FLEXIBLE + "&stuck_timeout=0.5")
    start(job, "a", timeout=1000, faults=[{"at": 2, "do": "retryable"}])
    start(job, "b", "c", timeout=1000)
    start(job, "d", timeout=1000, faults=[{"in": "sync", "at": 1, "do": "hold"}])
    ends(job, "a", "b", "c")
    assert job.code("d") != 0
    assert "in hold" in job.stderr.read_text(), "it says where it was"


@pytest.mark.parametrize("savers", [[0], [1, 2]])
def test_answers_about_checkpoints_that_differ_end_all(trainers, tmp_path, savers):
    job = trainers("min_workers=3&max_workers=3")
    start(job, *NAMES[:3], timeout=1000, checkpoints=str(tmp_path / "checkpoints"), savers=savers)
    for told in job.wait("stuck", 3):
        assert told["error"].startswith(
            f"should_save_checkpoint differs: False on {3 - len(savers)} of 3 workers"
        )


def test_a_child_that_a_step_forks_is_no_worker(trainers):
    job = trainers(FIXED)
    start(job, *NAMES[:3])
    start(job, "d", faults=[{"at": 2, "do": "fork"}])
    for told in ends(job, *NAMES):
        assert told["done"] == [1, 2, 3, 4, 5]
    (told,) = job.of("stuck", "d forked")
    assert "was forked from worker" in told["error"]
