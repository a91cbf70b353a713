"""Workers that are started by hand after the end of the training."""

import signal

import pytest

from .test_acceptance import ends, start

pytestmark = [pytest.mark.torch]


def test_a_late_worker_gets_the_final_state_and_its_own_rank(trainers, tmp_path):
    job = trainers("min_workers=2&max_workers=2")
    order = {"stays_until": str(tmp_path / "never")}
    start(job, ab=order)
    ends(job, *"ab")
    start(job, c=order)
    (late,) = ends(job, "c")
    assert late["done"] == [], "it took no step itself"
    assert late["env"] == ["2", "3"]
    # Check that a late worker can pass on the final state after the other workers have died.
    for name in "ab":
        job.kill(name)
        assert job.code(name) == -signal.SIGKILL
    start(job, d=order)
    (later,) = ends(job, "d")
    assert later["env"] == ["3", "4"]


def test_a_process_cannot_train_twice_in_one_job(trainers):
    job = trainers("min_workers=2&max_workers=2")
    start(job, ab={"twice": True})
    for told in job.wait("stuck", 2):
        assert "has already trained in job" in told["error"]
