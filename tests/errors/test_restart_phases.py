"""The phases of a restart, and the restarts that are left."""

import time

import pytest

from elasticrs.agent.attempt import Attempt, JobResult, phases
from elasticrs.job.restart_policy import FailureHistory, RestartSettings
from elasticrs.workers.plan import Plan


def test_restart_phases_cover_the_whole_restart():
    first, second = (Attempt(number, number, Plan([], "localhost", 1)) for number in (0, 1))
    first.stamps = {"ended": 40, "started": 10, "failure_seen": 20, "siblings_signalled": 30}
    second.stamps = {"planned": 42, "started": 50}
    assert phases(first, second) == {
        "signalling": 1e-5,
        "stopping": 1e-5,
        "rendezvous": 2e-6,
        "starting": 8e-6,
    }
    second.stamps |= {"planned": 1_000_040, "imported": 7_000_040, "started": 9_000_020}
    assert phases(first, second) == {
        "signalling": 1e-5,
        "stopping": 1e-5,
        "rendezvous": 1.0,
        "importing": 6.0,
        "starting": 1.99998,
    }
    # The failure was on another node, and the start of the workers was not recorded.
    first.stamps, second.stamps = {"ended": 40}, {"planned": 1_000_040}
    assert phases(first, second) == {"rendezvous": 1.0}
    first.stamps |= {"stopped": 30}
    assert phases(first, second) == {"stopping": 1e-5, "rendezvous": 1.0}
    first.stamps = {}
    assert phases(first, second) == {}


@pytest.mark.parametrize(
    ("delay", "found"), [(0.25, {"delay": 250.0, "rendezvous": 750.0}), (9.0, {"delay": 1000.0})]
)
def test_a_restart_delay_is_a_separate_phase(delay, found):
    first, second = Attempt(1, 0, None), Attempt(2, 1, None)
    first.delay, first.stamps = delay, {"ended": 0}
    second.stamps = {"planned": 1_000_000_000}
    assert phases(first, second) == found


def test_restarts_outside_the_window_do_not_reduce_the_restarts_left():
    now = time.monotonic()
    result = JobResult(read_history=lambda: FailureHistory(7, (now - 3601, now - 3599, now - 1)))
    assert result.restarts == 7
    assert result.restarts_left(RestartSettings(3, window=3600.0)) == 1
    assert result.restarts_left(RestartSettings(9)) == 2
