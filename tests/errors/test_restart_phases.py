"""The phases of a restart, and the number of restarts that are left."""

import time

import pytest
from helpers.attempts import adopted, attempt_of, failed, raised, stamped

from elasticrs._engine.job.restart_policy import FailureHistory, RestartSettings
from elasticrs._engine.supervise.attempt import JobResult, phases


def test_restart_phases_cover_the_whole_restart():
    first, second = (attempt_of(number, number) for number in (0, 1))
    stamped(first, ended=40, started=10)
    failed(first, 0, 20, 30)
    stamped(second, planned=42, started=50)
    assert phases(first, second) == {
        "signalling": 1e-5,
        "stopping": 1e-5,
        "rendezvous": 2e-6,
        "starting": 8e-6,
    }
    stamped(second, planned=1_000_040, imported=7_000_040, started=9_000_020)
    assert phases(first, second) == {
        "signalling": 1e-5,
        "stopping": 1e-5,
        "rendezvous": 1.0,
        "importing": 6.0,
        "starting": 1.99998,
    }
    # The failure was on another node, and the start of the workers was not recorded.
    first, second = stamped(attempt_of(0, 0), ended=40), stamped(attempt_of(1, 1), planned=1_000_040)
    assert phases(first, second) == {"rendezvous": 1.0}
    assert phases(stamped(first, stopped=30), second) == {"stopping": 1e-5, "rendezvous": 1.0}
    assert phases(attempt_of(0, 0), second) == {}


def test_a_restart_begins_with_the_exception_for_whose_exit_the_agent_waited():
    first, second = attempt_of(0, 0), attempt_of(1, 1)
    stamped(adopted(first, 7, 8), started=1_000_000, ended=8_000_000)
    raised(first, 1, pid=8, seen_ns=2_000_000)
    failed(first, 1, 5_000_000, 6_000_000)
    stamped(second, started=9_000_000)
    found = {"exiting": 3.0, "signalling": 1.0, "stopping": 2.0, "starting": 1.0}
    assert (phases(first, second), first.failed_ns) == (found, 2_000_000)
    stamped(first, kept=6_750_000)
    found = {"exiting": 3.0, "signalling": 1.0, "keeping": 0.75, "stopping": 1.25, "starting": 1.0}
    assert phases(first, second) == found


@pytest.mark.parametrize(
    ("exceptions", "seen_ns"), [({}, 5), ({0: (7, 5)}, 5), ({0: (9, 3)}, 5), ({1: (8, 3)}, 5)]
)
def test_a_restart_begins_with_the_failure_if_the_agent_waited_for_no_exit(exceptions, seen_ns):
    attempt = adopted(attempt_of(0, 0), 7, 8)
    for rank, (pid, at_ns) in exceptions.items():
        raised(attempt, rank, pid=pid, seen_ns=at_ns)
    failed(attempt, 0, seen_ns)
    assert attempt.failed_ns == seen_ns


@pytest.mark.parametrize(
    ("delay", "found"), [(0.25, {"delay": 250.0, "rendezvous": 750.0}), (9.0, {"delay": 1000.0})]
)
def test_a_restart_delay_is_a_separate_phase(delay, found):
    first, second = stamped(attempt_of(1, 0), ended=0), stamped(attempt_of(2, 1), planned=1_000_000_000)
    first.delay = delay
    assert phases(first, second) == found


def test_restarts_outside_the_window_do_not_reduce_the_restarts_left():
    now = time.monotonic()
    result = JobResult(read_history=lambda: FailureHistory(7, (now - 3601, now - 3599, now - 1)))
    assert result.restarts == 7
    assert result.restarts_left(RestartSettings(3, window=3600.0)) == 1
    assert result.restarts_left(RestartSettings(9)) == 2
