"""The scenarios of the first torchelastic with real processes: the sum is correct after every fault.

Each is played with workers that are started by hand, by one agent, and each by an agent of its own. What
differs under agents: a worker that fails is replaced, so that four finish where by hand two do; what is lost
for good is a node; and who comes later is a node, too.
"""

import signal

import pytest
from helpers.said import says

from .conftest import BY_HAND, NODES, ONE_NODE

pytestmark = [pytest.mark.torch]

FIXED = (4, 4)
FLEXIBLE = (2, 4)
AT_ONCE = {"last_call_timeout": 1, "scale_up_delay": 0}
SIZE = 100
TOTAL = sum(range(SIZE))


def start(job, *, restarts=4, meets=False, **orders):
    """Start a worker for each letter in the names of ``orders``."""
    each = {name: {"size": SIZE, **order} for names, order in orders.items() for name in names}
    job.start_all(each, restarts=restarts, meets=meets)


def with_replacements(how):
    """Return the limits for the number of workers. With replacements, the survivors wait for the
    new workers.
    """
    return FLEXIBLE if how == BY_HAND else FIXED


def fails(do, at=2, **more):
    """Return an order that makes a worker do something in step ``at``."""
    return {"faults": [{"do": do, "at": at, **more}]}


def ends(job, *names, size=SIZE):
    """Wait until all of these have finished, and check that each sample was taken exactly once."""
    job.wait_until(lambda: {told["name"] for told in job.of("finished")} >= set(names))
    found = [job.of("finished", name)[0] for name in names]
    for told in found:
        assert (told["taken"], told["total"]) == (size, sum(range(size))), told
    job.over()
    return found


def test_1_a_normal_run_completes_all_steps_without_errors(job_of, how):
    job = job_of(*FIXED)
    start(job, abcd={})
    for told in ends(job, *"abcd"):
        assert told["done"] == [1, 2, 3, 4, 5]
        assert told["straggler"] is False
        assert set(told["threads"]) <= {"MainThread", "elasticrs-handover"}
    # All four workers meet once at the start and once at the end.
    assert len(job.of("met")) == 8
    if how == BY_HAND:
        assert all(job.code(name) == 0 for name in "abcd")
        assert job.stderr_text() == ""


def test_2_a_missing_worker_fails_the_others_at_the_join_timeout(job_of, how):
    # Under agents, the missing worker is started, but hangs before it meets the others.
    job = job_of(*FIXED, join_timeout=1)
    start(job, restarts=0, abc={}, **({"d": fails("hold", 0, **{"in": "begin"})} if how != BY_HAND else {}))
    for told in job.wait("stuck", 3):
        assert "permanently stuck" in told["error"]
    job.fails(*("abc" if how == BY_HAND else "abcd"))


def test_3_a_straggler_is_detected_by_its_rate(job_of):
    job = job_of(*FIXED)
    start(job, abc={"rate": 100, "monitor": 3}, d={"rate": 42, "monitor": 3})
    told = ends(job, *"abcd")
    assert [each["straggler"] for each in told] == [False, False, False, True]
    assert [each["relative_rate"] for each in told] == [1, 1, 1, 0.42]


def test_4_a_job_starts_with_the_minimum_number_of_workers(job_of):
    # Under a single agent, the two workers are one node, and a second node could join.
    job = job_of(*FLEXIBLE, **AT_ONCE)
    start(job, ab={})
    for told in ends(job, *"ab"):
        assert len(told["done"]) == 10
    assert {told["world"] for told in job.of("met")} == {2}


def test_5_workers_can_rendezvous_after_every_step(job_of):
    job = job_of(*FIXED)
    start(job, abcd={"always": True})
    ends(job, *"abcd")
    assert len(job.of("met", "a")) >= 6


def test_6_training_ends_with_the_shortest_data_and_a_late_worker_gets_no_state(job_of, how):
    job = job_of(*FIXED)
    start(job, meets=True, abc={}, d={"own_end": 3})
    job.wait_until(lambda: len(job.of("finished")) == 4)
    # The first worker without data ends the training, and all workers return the same state.
    assert {(told["steps"], told["taken"]) for told in job.of("finished")} == {(3, 60)}
    assert len({told["total"] for told in job.of("finished")}) == 1
    job.over()
    if how == BY_HAND:
        # The new worker fails, because no living worker has the final state.
        start(job, e={})
        told = job.wait("stuck", name="e")[0]
        says(told["error"], "had ended", "set_checkpoint_manager")
        job.fails("e")
    else:
        # The late agent does not start its workers.
        assert "is closed: succeeded" in job.comes_late("efgh" if how == ONE_NODE else "e")
        assert {told["name"] for told in job.of("up")} == {*"abcd"}


def test_7_two_workers_fail_once_and_one_step_is_repeated(job_of):
    job = job_of(*FIXED)
    start(job, ab={}, cd=fails("retryable"))
    for told in ends(job, *"abcd"):
        assert told["done"] == [1, 2, 3, 4, 5]
    # All 4 workers meet at the start, at the end, and once or twice in between, because two workers fail.
    assert len(job.of("met")) in {12, 16}


def test_8_fatal_errors_of_two_workers_do_not_end_the_others(job_of, how):
    job = job_of(*with_replacements(how), **AT_ONCE)
    start(job, ab={}, cd=fails("fatal"))
    ends(job, *"ab", *job.after(*"cd"))
    assert job.of("met", "a")[-1]["world"] == (2 if how == BY_HAND else 4)
    for name in "cd":
        job.replaced(name, 1)
    assert job.stderr_text().count("NameError: on purpose") >= 2


def test_9_two_workers_that_always_fail_give_up_and_the_others_finish(job_of, how):
    job = job_of(*with_replacements(how), **AT_ONCE)
    start(job, ab={"max_failures": 5}, cd={"max_failures": 5, **fails("retryable", times=100)})
    told = job.wait("gave up", 2)
    assert all("failures: 5 of" in each["error"] for each in told)
    assert {each["name"] for each in told} == {"c", "d"}
    ends(job, *"ab", *job.after(*"cd"))


def test_10_a_failed_sync_is_retried(job_of):
    job = job_of(*FIXED)
    start(job, abc={}, d=fails("retryable", 0, times=2, **{"in": "sync"}))
    ends(job, *"abcd")
    assert len(job.of("does", "d")) == 2


def test_11_a_new_run_continues_from_the_checkpoint_of_a_killed_run(job_of, how, tmp_path):
    # With agents, the new run consists of the replacements that the agents start.
    with_checkpoints = {"checkpoints": str(tmp_path / "checkpoints")}
    job = job_of(*FIXED)
    start(job, abcd={**with_checkpoints, **fails("hold", 3)})
    job.wait("does", 4)
    for name in "abcd":
        job.kill(name)
    again = job.after(*"abcd") or "efgh"
    if how == BY_HAND:
        start(job, efgh=with_checkpoints)
    for told in ends(job, *again):
        assert told["done"] == [4, 5]
    assert {told["step"] for told in job.of("met", *again)} == {3, 5}
    for name in "abcd":
        job.replaced(name, -9)


def test_12_training_finishes_after_two_workers_are_killed(job_of, how):
    # If each worker has its own node, two nodes are lost.
    job = job_of(*FLEXIBLE, **AT_ONCE)
    start(job, ab={}, cd=fails("hold" if how == NODES else "kill"))
    if how == NODES:
        job.wait("does", 2)
        job.lose("c")
        job.lose("d")
        ends(job, *"ab")
    else:
        ends(job, *"ab", *job.after(*"cd"))
        for name in "cd":
            job.replaced(name, -9)
    assert job.of("met", "a")[-1]["world"] == (4 if how == ONE_NODE else 2)


def test_13_two_hung_workers_exit_and_the_others_finish(job_of, how):
    job = job_of(*with_replacements(how), **AT_ONCE, stuck_timeout=2)
    # Only one of them spins, because it takes the time of a whole processor.
    start(
        job, ab={"timeout": 1000}, c={"timeout": 1000, **fails("spin")}, d={"timeout": 1000, **fails("hold")}
    )
    ends(job, *"ab", *job.after(*"cd"))
    # They end themselves, and say where they were.
    for name in "cd":
        job.replaced(name, 1)
    says(job.stderr_text(), "rank ", "round ", "ends itself")
    says(job.stderr_text(), "in spin")
    says(job.stderr_text(), "in hold")


def test_14_a_failed_step_is_repeated_without_snapshots(job_of):
    job = job_of(*FIXED)
    start(job, abc={"rollback": False}, d={"rollback": False, **fails("retryable")})
    for told in ends(job, *"abcd"):
        assert told["done"] == [1, 2, 3, 4, 5]


def test_15_two_workers_join_during_training_and_no_step_is_repeated(job_of, tmp_path):
    # Under agents, the new workers are one node of two workers, or two nodes.
    # A lease that expires on a loaded machine would interrupt a worker.
    job = job_of(*FLEXIBLE, **AT_ONCE, keep_alive_interval=5)
    all_are_here = tmp_path / "all are here"
    # Keep the training slow until the two new workers have joined.
    order = {"size": 4000, "slow_until": str(all_are_here)}
    start(job, ab=order)
    job.wait("met", 2)
    start(job, cd=order)
    job.wait("met", 4, world=4)
    all_are_here.touch()
    # No worker was interrupted, so no step was repeated or lost.
    for told in ends(job, *"abcd", size=4000):
        assert len(told["done"]) == len(set(told["done"]))
    assert "interrupted by" not in job.stderr_text()


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
