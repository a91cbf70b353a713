"""The phases of a restart, and the number of restarts that are left."""

import time
from types import SimpleNamespace

import pytest

from elasticrs._engine.job.restart_policy import FailureHistory, RestartSettings
from elasticrs._engine.supervise.attempts.attempt import Attempt, JobResult, phases
from elasticrs._engine.workers.plan import Plan


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


def test_a_restart_begins_with_the_exception_for_whose_exit_the_agent_waited():
    first, second = Attempt(0, 0, None), Attempt(1, 1, None)
    first.pids, first.stamps = [7, 8], {"started": 1_000_000}
    first.raised[1] = SimpleNamespace(pid=8, seen_ns=2_000_000)
    first.see_failure(1, 5_000_000)
    first.stamps |= {"siblings_signalled": 6_000_000, "ended": 8_000_000}
    second.stamps = {"started": 9_000_000}
    found = {"exiting": 3.0, "signalling": 1.0, "stopping": 2.0, "starting": 1.0}
    assert (phases(first, second), first.failed_ns) == (found, 2_000_000)


@pytest.mark.parametrize(
    ("raised", "seen_ns"), [({}, 5), ({0: (7, 5)}, 5), ({0: (9, 3)}, 5), ({1: (8, 3)}, 5)]
)
def test_a_restart_begins_with_the_failure_if_the_agent_waited_for_no_exit(raised, seen_ns):
    attempt = Attempt(0, 0, None)
    attempt.pids = [7, 8]
    attempt.raised = {rank: SimpleNamespace(pid=pid, seen_ns=at) for rank, (pid, at) in raised.items()}
    attempt.see_failure(0, seen_ns)
    assert attempt.failed_ns == seen_ns


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
