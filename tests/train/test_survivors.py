"""Workers die, hang, join and leave. The others keep their processes and continue from the latest state."""

import os
import signal
import socket

import pytest
from helpers.procs import HANG
from helpers.trainers import ByHand, Told

from train.soak import soak

pytestmark = [pytest.mark.torch]

FIXED = "min_workers=4&max_workers=4"
FLEXIBLE = "min_workers=2&max_workers=4&last_call_timeout=1&scale_up_delay=0"
SHORT_LEASE = "&keep_alive_interval=0.2&keep_alive_max_attempt=5&settle=10"

NAMES = ("a", "b", "c", "d")


def sums_are_right(job: ByHand) -> None:
    """Check that the sum of each finished trainer counts each step exactly once."""
    ends = job.of("done") + job.of("stopped")
    assert ends
    for told in ends:
        assert told["equal"]
        assert told["sum"] == told["step"], told


def met_in_one_round(job: ByHand, names: str, timeout: float = HANG) -> list[Told]:
    """Wait until all of these are in the same round. On a loaded machine, a lease may expire and cause
    another round.
    """

    def last() -> list[Told]:
        return [told[-1] for name in names if (told := job.of("met", name))]

    job.wait_until(
        lambda: len(last()) == len(names) and len({each["round"] for each in last()}) == 1, timeout
    )
    return last()


def test_an_undisturbed_job_ends_without_errors(trainers):
    job = trainers(FIXED)
    job.start(*NAMES, steps=3)
    job.wait("done", 4)
    sums_are_right(job)
    assert not job.of("failed") + job.of("raised") + job.of("stopped")
    assert all(job.code(name) == 0 for name in NAMES)
    assert job.stderr.read_text() == ""


@pytest.mark.parametrize("loop", ["coordinator", "by_hand"])
def test_a_new_worker_ends_at_the_same_step_as_the_others(trainers, loop):
    job = trainers(FIXED)
    job.start(*NAMES, loop=loop, steps=150, pause=0.01)
    job.wait("stepped", 4)
    job.kill("a")
    job.start("e", loop=loop, steps=150, pause=0.01)
    job.wait_until(lambda: len(job.of("done")) + len(job.of("stopped")) == 4)
    sums_are_right(job)
    assert {each["step"] for each in job.of("done") + job.of("stopped")} == {150}
    met = [job.of("met", name)[-1] for name in "bcde"]
    assert sorted(each["rank"] for each in met) == [0, 1, 2, 3]
    assert all(each["env"] == [str(each["rank"]), "4"] for each in met), "the environment is the round's"
    for name in "bcde":
        assert job.code(name) == 0
    # Only the custom loop is told of changes.
    assert True not in [planned for each in job.of("raised") for planned in each.get("planned", ())]


def test_new_workers_are_admitted_at_a_step_boundary(trainers):
    job = trainers(FLEXIBLE + "&keep_alive_interval=5")
    job.start("a", "b", pause=0.005)
    job.wait("stepped", 2)
    job.start("c", "d", pause=0.005)
    job.wait("met", 4, world=4)
    # No worker was interrupted, and both left at the same step.
    assert not job.of("raised")
    left = job.of("left", "a", "b")
    assert len({each["step"] for each in left[-2:]}) == 1


@pytest.mark.parametrize("subgroup", [False, True], ids=["default group", "further group"])
def test_collectives_with_a_paused_worker_are_aborted_when_its_lease_expires(trainers, subgroup):
    job = trainers(FIXED + SHORT_LEASE)
    job.start(*NAMES, timeout=60000, subgroup=subgroup)
    job.wait("stepped", 4)
    # Stop the process instead of killing it. Its connections stay open, so its death does not end the
    # collective.
    job.kill("c", signal.SIGSTOP)
    job.start("e", subgroup=subgroup)
    # The others meet long before the collective times out.
    met_in_one_round(job, "abde", timeout=30)


@pytest.mark.parametrize("dies_in_creation", [True, False])
def test_a_connection_of_another_thread_during_group_creation_stays_open(trainers, dies_in_creation):
    job = trainers(FIXED)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(HANG)
        job.start("a", holds=server.getsockname()[1])
        job.start("b", "c")
        job.start("d", do="wait in creation" if dies_in_creation else None)
        connection, _ = server.accept()
        if dies_in_creation:
            job.wait("creates", name="d")
        with connection:
            if not dies_in_creation:
                job.wait("stepped", 4)
            job.kill("d")
            assert job.code("d") == -signal.SIGKILL
            job.start("e")
            met_in_one_round(job, "abce")
            connection.settimeout(HANG)
            connection.sendall(b"x")
            assert connection.recv(1) == b"x"


def test_a_worker_that_starts_after_the_end_returns_at_once(trainers):
    job = trainers("min_workers=2&max_workers=2")
    job.start("a", "b", steps=5)
    job.wait_until(lambda: len(job.of("done")) + len(job.of("stopped")) == 2)
    job.start("late", steps=5)
    assert job.wait("stopped", name="late")[0]["step"] == -1


def test_a_forked_child_does_not_keep_the_place_of_a_killed_worker(trainers):
    # With these settings, only the closed connection can show in time that the worker is gone.
    job = trainers(FIXED + "&keep_alive_interval=30&keep_alive_max_attempt=5&settle=300")
    job.start("a", "b", "c", timeout=300_000)
    job.start("d", timeout=300_000, do="fork", at=3)
    child = job.wait("forked")[0]["child"]
    job.kill("d")
    job.start("e", timeout=300_000)
    met_in_one_round(job, "abce", timeout=30)
    # Reap the orphan, which this process has adopted.
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_straggler_is_found_by_its_rate(trainers):
    job = trainers(FIXED)
    job.start("a", "b", "c", rate=100, pause=0.001)
    job.start("d", rate=42, pause=0.001)
    assert job.wait("straggles")[0]["name"] == "d"
    job.kill("a")
    job.start("e", rate=100, pause=0.001)
    # The new round flags the straggler again.
    assert job.wait("straggles")[0]["name"] == "d"
    assert {each["name"] for each in job.of("straggles")} == {"d"}


def test_training_survives_kills_during_a_recovery(trainers, tmp_path):
    job = trainers(FIXED)
    soak(job, 12, 0, tmp_path / "end")
