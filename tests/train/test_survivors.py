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
SHORT_LEASE = "&keep_alive_interval=0.2&keep_alive_max_attempt=5&settle=10"

NAMES = ("a", "b", "c", "d")
ENDLESS = {"size": 1 << 40, "shuffle": False, "pause": 0}


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


@pytest.mark.parametrize("loop", ["train", "on_change"])
def test_a_new_worker_ends_at_the_same_step_as_the_others(trainers, loop):
    job = trainers(FIXED)
    order = {"loop": loop, "size": 3000, "steps": 150, "pause": 0.01}
    job.start(*NAMES, **order)
    job.wait("stepped", 4)
    job.kill("a")
    job.start("e", **order)
    job.wait_until(lambda: len(job.of("finished")) == 4)
    for told in job.of("finished"):
        # The sum counts each step, or each sample, exactly once.
        assert (told["steps"], told["total"]) == (150, 150 if loop == "on_change" else sum(range(3000)))
    met = [job.of("met", name)[-1] for name in "bcde"]
    assert sorted(each["rank"] for each in met) == [0, 1, 2, 3]
    assert all(each["env"] == [str(each["rank"]), "4"] for each in met), "the environment is the round's"
    for name in "bcde":
        assert job.code(name) == 0
    # Only the custom loop is told of changes.
    assert True not in [planned for each in job.of("raised") for planned in each["planned"]]


@pytest.mark.parametrize("subgroup", [False, True], ids=["default group", "further group"])
def test_collectives_with_a_paused_worker_are_aborted_when_its_lease_expires(trainers, subgroup):
    job = trainers(FIXED + SHORT_LEASE)
    order = {**ENDLESS, "timeout": 50000, "subgroup": subgroup}
    job.start(*NAMES, **order)
    job.wait("stepped", 4)
    # Stop the process instead of killing it. Its connections stay open, so its death does not end the
    # collective.
    job.kill("c", signal.SIGSTOP)
    job.start("e", **order)
    # The others meet long before the collective times out.
    met_in_one_round(job, "abde", timeout=30)


@pytest.mark.parametrize("dies_in_creation", [True, False])
def test_a_connection_of_another_thread_during_group_creation_stays_open(trainers, dies_in_creation):
    job = trainers(FIXED)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(HANG)
        job.start("a", **ENDLESS, holds=server.getsockname()[1])
        job.start("b", "c", **ENDLESS)
        job.start("d", **ENDLESS, **({"holds": None} if dies_in_creation else {}))
        connection, _ = server.accept()
        if dies_in_creation:
            job.wait("creates", name="d")
        with connection:
            if not dies_in_creation:
                job.wait("stepped", 4)
            job.kill("d")
            assert job.code("d") == -signal.SIGKILL
            job.start("e", **ENDLESS)
            met_in_one_round(job, "abce")
            connection.settimeout(HANG)
            connection.sendall(b"x")
            assert connection.recv(1) == b"x"


def test_a_forked_child_does_not_keep_the_place_of_a_killed_worker(trainers):
    # With these settings, only the closed connection can show in time that the worker is gone.
    job = trainers(FIXED + "&keep_alive_interval=30&keep_alive_max_attempt=5&settle=300")
    order = {**ENDLESS, "timeout": 300_000, "control_timeout": 400_000}
    job.start("a", "b", "c", **order)
    job.start("d", **order, faults=[{"at": 3, "do": "fork_sleeper"}])
    child = job.wait("forked")[0]["child"]
    job.kill("d")
    job.start("e", **order)
    met_in_one_round(job, "abce", timeout=30)
    # Reap the orphan, which this process has adopted.
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_each_round_finds_a_straggler_anew(trainers):
    job = trainers(FIXED)
    order = {**ENDLESS, "monitor": 5}
    job.start("a", "b", "c", **order, rate=100)
    job.start("d", **order, rate=42)
    assert job.wait("straggles")[0]["name"] == "d"
    job.kill("a")
    job.start("e", **order, rate=100)
    assert job.wait("straggles")[0]["name"] == "d"
    assert {each["name"] for each in job.of("straggles")} == {"d"}


def test_training_survives_kills_during_a_recovery(trainers, tmp_path):
    job = trainers(FIXED)
    soak(job, 12, 0, tmp_path / "end")
