"""The machine-readable timeline of a job."""

import json
import time
from types import SimpleNamespace

import pytest

from elasticrs.agent.attempt import Attempt, JobResult, phases
from elasticrs.agent.timeline import records, write
from elasticrs.job.restart_policy import FailureHistory, RestartSettings
from elasticrs.workers.plan import Plan


def failed_and_restarted() -> list[Attempt]:
    first, second = (Attempt(number, number, Plan([], "localhost", 1)) for number in (0, 1))
    first.pids, second.pids = [11, 12], [21, 22]
    first.stamps = {"ended": 40, "started": 10, "failure_seen": 20, "siblings_signalled": 30}
    first.first_failure, first.signalled = 1, 1
    first.exits = {1: SimpleNamespace(pid=12, exitcode=-9)}  # type: ignore[dict-item]
    second.stamps = {"planned": 42, "started": 50}
    second.warm, second.why_cold = False, "the import of numpy died by SIGSEGV"
    second.phases = phases(first, second)
    return [second, first]


def test_timeline_events_are_in_chronological_order():
    assert records(failed_and_restarted()) == [
        {
            "event": "started",
            "ns": 10,
            "attempt": 0,
            "restart_count": 0,
            "pids": [11, 12],
            "warm": None,
            "why_cold": None,
            "phases_ms": {},
        },
        {
            "event": "failure_seen",
            "ns": 20,
            "attempt": 0,
            "restart_count": 0,
            "local_rank": 1,
            "pid": 12,
            "exitcode": -9,
        },
        {"event": "siblings_signalled", "ns": 30, "attempt": 0, "restart_count": 0, "siblings": 1},
        {"event": "group_ended", "ns": 40, "attempt": 0, "restart_count": 0},
        {"event": "planned", "ns": 42, "attempt": 1, "restart_count": 1},
        {
            "event": "started",
            "ns": 50,
            "attempt": 1,
            "restart_count": 1,
            "pids": [21, 22],
            "warm": False,
            "why_cold": "the import of numpy died by SIGSEGV",
            "phases_ms": {"signalling": 1e-5, "stopping": 1e-5, "rendezvous": 2e-6, "starting": 8e-6},
        },
    ]


def test_restart_phases_cover_the_whole_restart():
    second, first = failed_and_restarted()
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


def test_the_timeline_file_has_one_line_per_event(tmp_path):
    path = tmp_path / "timeline.jsonl"
    path.write_text("of an earlier job\n")
    attempts = failed_and_restarted()
    write(str(path), attempts)
    assert [json.loads(line) for line in path.read_text().splitlines()] == records(attempts)


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
