"""Workers that are started by hand after the end of the training get the final state, or fail."""

import signal

import pytest

from .test_acceptance import ends, start

pytestmark = [pytest.mark.torch]


@pytest.fixture
def ended(trainers, tmp_path):
    """Return a job whose two workers have finished the training and are still alive."""
    job = trainers("min_workers=2&max_workers=2")
    order = {"stays_until": str(tmp_path / "never")}
    start(job, a=order, b=order)
    ends(job, *"ab")
    return job, order


def test_a_late_worker_gets_the_final_state_and_a_rank_of_its_own(ended):
    job, order = ended
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


def test_a_late_worker_fails_when_no_live_worker_has_the_final_state(ended):
    job, order = ended
    for name in "ab":
        job.kill(name)
        assert job.code(name) == -signal.SIGKILL
    start(job, c=order)
    (told,) = job.wait("stuck", name="c")
    assert "set_checkpoint_manager" in told["error"]
    assert job.code("c") == 1


def test_the_final_checkpoint_is_used_when_no_worker_has_a_copy(trainers, tmp_path):
    job = trainers("min_workers=2&max_workers=2")
    # No periodic checkpoint was due, so the only checkpoint has the final state.
    order = {"checkpoints": str(tmp_path / "checkpoints"), "savers": []}
    start(job, ab=order)
    ends(job, *"ab")
    for name in "ab":
        assert job.code(name) == 0
    start(job, c=order)
    (late,) = ends(job, "c")
    assert late["done"] == []


def test_a_process_does_not_train_twice_in_one_job(trainers):
    job = trainers("min_workers=2&max_workers=2")
    start(job, ab={"twice": True})
    for told in job.wait("stuck", 2):
        assert "has already trained in job" in told["error"]
