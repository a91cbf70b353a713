"""The scenarios of the first torchelastic on real processes: whatever happens, the sum comes out equal."""

import pytest
from helpers.trainers import Trainers

pytestmark = [pytest.mark.torch]

FIXED = "min_workers=4&max_workers=4"
FLEXIBLE = "min_workers=2&max_workers=4&last_call_timeout=1&scale_up_delay=0"
NAMES = ("a", "b", "c", "d")
SIZE = 100
TOTAL = sum(range(SIZE))
ORDER = {"loop": "train", "size": SIZE}


def start(job: Trainers, *names, **order):
    job.start(*names, **ORDER, **order)


def ends(job: Trainers, *names):
    """Wait until all of these have finished: every sample was taken once, by some worker."""
    job.wait_until(lambda: {told["name"] for told in job.of("finished")} >= set(names))
    found = [job.of("finished", name)[0] for name in names]
    for told in found:
        assert (told["taken"], told["total"]) == (SIZE, TOTAL), told
    return found


def test_1_a_normal_run(trainers):
    job = trainers(FIXED)
    start(job, *NAMES)
    for told in ends(job, *NAMES):
        assert told["done"] == [1, 2, 3, 4, 5]
        assert told["straggler"] is False
    # Once at the start, and once at the end.
    assert len(job.of("met")) == 8


def test_2_a_worker_that_does_not_come(trainers):
    job = trainers(FIXED + "&timeout=1")
    start(job, *NAMES[:3])
    for told in job.wait("stuck", 3):
        assert "permanently stuck" in told["error"]


def test_3_a_straggler_is_known(trainers):
    job = trainers(FIXED)
    start(job, *NAMES[:3], rate=100, monitor=3)
    start(job, "d", rate=42, monitor=3)
    assert [told["straggler"] for told in ends(job, *NAMES)] == [False, False, False, True]


def test_6_uneven_data_then_one_that_comes_late(trainers):
    job = trainers(FIXED)
    start(job, *NAMES[:3])
    start(job, "d", own_end=3)
    job.wait_until(lambda: len(job.of("finished")) == 4)
    # The first that has no more ends it, and all return the same.
    assert {(told["steps"], told["taken"]) for told in job.of("finished")} == {(3, 60)}
    assert len({told["total"] for told in job.of("finished")}) == 1
    start(job, "late")
    told = job.wait("finished", name="late")[0]
    assert (told["steps"], told["taken"], told["done"]) == (0, 0, [])


def test_7_two_fail_once_and_one_step_is_repeated(trainers):
    job = trainers(FIXED)
    start(job, "a", "b")
    start(job, "c", "d", faults=[{"at": 2, "do": "retryable"}])
    for told in ends(job, *NAMES):
        assert told["done"] == [1, 2, 3, 4, 5]
    # All meet in the middle, at most once for each that has failed.
    assert len(job.of("met")) in {12, 16}


def test_8_an_error_that_is_fatal_for_two_is_not_for_the_others(trainers):
    job = trainers(FLEXIBLE)
    start(job, "a", "b")
    start(job, "c", "d", faults=[{"at": 2, "do": "fatal"}])
    ends(job, "a", "b")
    assert job.of("met", "a")[-1]["world"] == 2
    for name, code in zip(NAMES, (0, 0, 1, 1), strict=True):
        assert job.code(name) == code
    assert job.stderr.read_text().count("NameError: on purpose") == 2


def test_9_two_that_always_fail_give_up_and_the_others_finish(trainers):
    job = trainers(FLEXIBLE)
    start(job, "a", "b", max_failures=5)
    start(job, "c", "d", faults=[{"at": 2, "do": "retryable", "times": 100}], max_failures=5)
    told = job.wait("gave up", 2)
    assert all("max number of recoverable failures: 5 of this worker" in each["error"] for each in told)
    ends(job, "a", "b")


def test_10_a_sync_that_fails(trainers):
    job = trainers(FIXED)
    start(job, "a", "b", "c")
    start(job, "d", faults=[{"in": "sync", "at": 0, "do": "retryable", "times": 2}])
    ends(job, *NAMES)


def test_11_all_are_killed_and_a_new_run_goes_on_from_the_checkpoint(trainers, tmp_path):
    folder = str(tmp_path / "checkpoints")
    job = trainers(FIXED)
    start(job, *NAMES, checkpoints=folder, faults=[{"at": 3, "do": "hold"}])
    job.wait("does", 4)
    for name in NAMES:
        job.kill(name)
        assert job.code(name) == -9
    again = tuple(name * 2 for name in NAMES)
    start(job, *again, checkpoints=folder)
    for told in ends(job, *again):
        assert told["done"] == [4, 5]
    assert {told["step"] for told in job.of("met", *again)} == {3, 5}


def test_14_without_snapshots(trainers):
    job = trainers(FIXED)
    start(job, "a", "b", "c", rollback=False)
    start(job, "d", rollback=False, faults=[{"at": 2, "do": "retryable"}])
    for told in ends(job, *NAMES):
        assert told["done"] == [1, 2, 3, 4, 5]


def test_4_a_start_with_the_fewest(trainers):
    job = trainers(FLEXIBLE)
    start(job, "a", "b")
    for told in ends(job, "a", "b"):
        assert len(told["done"]) == 10
    assert {told["world"] for told in job.of("met")} == {2}


def test_5_a_meeting_after_every_step(trainers):
    job = trainers(FIXED)
    start(job, *NAMES, always=True)
    ends(job, *NAMES)
    assert len(job.of("met", "a")) >= 6


def test_12_two_kill_themselves(trainers):
    job = trainers(FLEXIBLE)
    start(job, "a", "b")
    start(job, "c", "d", faults=[{"at": 2, "do": "kill"}])
    ends(job, "a", "b")
    assert job.code("c") == job.code("d") == -9


def test_13_two_spin_for_ever(trainers):
    job = trainers(FLEXIBLE + "&stuck_timeout=3")
    start(job, "a", "b", timeout=2000)
    start(job, "c", "d", timeout=2000, faults=[{"at": 2, "do": "spin"}])
    ends(job, "a", "b")
    assert job.code("c") == job.code("d") == 1, "they end themselves"


def test_15_two_come_in_the_middle(trainers, tmp_path):
    job = trainers(FLEXIBLE)
    all_are_here = tmp_path / "all are here"
    # Long enough for the two to come, then no longer.
    order = {"loop": "train", "size": 4000, "slow_until": str(all_are_here)}
    job.start("a", "b", **order)
    job.wait("met", 2)
    job.start("c", "d", **order)
    job.wait("met", 4, world=4)
    all_are_here.touch()
    job.wait("finished", 4)
    for told in job.of("finished"):
        assert (told["taken"], told["total"]) == (4000, sum(range(4000)))
    # Nobody was broken off: no step is done twice, and none is lost.
    for name in NAMES:
        done = job.of("finished", name)[0]["done"]
        assert len(done) == len(set(done))
