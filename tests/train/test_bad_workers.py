"""Workers that break the rules, in real processes: there is one clear error, and no other worker waits
forever.
"""

import signal

import pytest
from helpers.said import says

from .test_acceptance import ends, fails, start

pytestmark = [pytest.mark.torch]


def test_a_sync_that_never_returns_ends_only_its_own_worker(trainers):
    job = trainers("min_workers=2&max_workers=4&last_call_timeout=1&scale_up_delay=0&stuck_timeout=2")
    quick = {"timeout": 1000}
    start(job, a=quick | fails("retryable"), bc=quick, d=quick | fails("hold", 1, **{"in": "sync"}))
    ends(job, *"abc")
    assert job.code("d") != 0
    assert "in hold" in job.stderr_text(), "it says where it was"


def test_a_long_save_survives_the_death_of_another_worker(trainers, tmp_path):
    job = trainers("min_workers=2&max_workers=4&last_call_timeout=1&scale_up_delay=0&stuck_timeout=2")
    released = tmp_path / "released"
    # One worker hangs, and exits when its stuck timeout expires. The worker that saves must survive that
    # moment.
    faults = [
        {"in": "save", "at": 2, "do": "keep", "once": str(tmp_path / "saves")},
        {"in": "due", "at": 2, "do": "hold", "once": str(tmp_path / "holds")},
    ]
    start(job, abcd={"checkpoints": str(tmp_path / "c"), "faults": faults, "kept_until": str(released)})
    did = {told["do"]: told["name"] for told in job.wait("does", 2)}
    dead, left = sorted({*"abcd"} - set(did.values()))
    job.kill(dead, signal.SIGKILL)
    assert job.code(did["hold"]) == 1
    released.touch()
    ends(job, did["keep"], left)


@pytest.mark.parametrize("savers", [[0], [1, 2]])
def test_disagreement_on_saving_a_checkpoint_ends_all_workers(trainers, tmp_path, savers):
    job = trainers("min_workers=3&max_workers=3")
    start(job, abc={"timeout": 1000, "checkpoints": str(tmp_path / "checkpoints"), "savers": savers})
    for told in job.wait("stuck", 3):
        asked = f"False on {3 - len(savers)} of 3"
        says(told["error"], "should_save_checkpoint", asked, "step 1 of")


def test_a_child_forked_in_a_step_does_not_count_as_a_worker(trainers):
    job = trainers("min_workers=4&max_workers=4")
    start(job, abc={}, d=fails("fork"))
    for told in ends(job, *"abcd"):
        assert told["done"] == [1, 2, 3, 4, 5]
    (told,) = job.of("stuck", "d forked")
    assert "forked" in told["error"]


def test_a_worker_error_that_quotes_gloo_counts_against_that_worker(trainers):
    job = trainers("min_workers=1&max_workers=2&last_call_timeout=1&scale_up_delay=0")
    start(job, a={}, b={"max_failures": 3, **fails("words_of_gloo", times=1000)})
    (told,) = job.wait("gave up")
    assert told["name"] == "b"
    assert "failures: 3 of" in told["error"]
    ends(job, "a")
    assert "in words_of_gloo" in job.stderr_text(), "the first error is shown with its traceback"


def test_a_failed_group_creation_counts_as_the_workers_own_failure(trainers):
    job = trainers("min_workers=1&max_workers=2&last_call_timeout=1&scale_up_delay=0")
    # Creating a group fails, because PyTorch's packages are built without MPI.
    start(job, ab={"backend": "mpi", "max_failures": 3})
    for told in job.wait("gave up", 2):
        assert "failures: 3 of" in told["error"]
    assert "Traceback" in job.stderr_text()
