"""When a worker of another node hangs, a stop of this group first reports the workers that the other one may
be waiting for.
"""

import os
import signal
import sys

import pytest

from elasticrs import _core

POLICY = _core.StopPolicy(signal.SIGTERM, 60.0)

BEATS = """
import os, sys
from elasticrs.timer import heartbeat
heartbeat(int(sys.argv[1]))
os.write(int(sys.argv[2]), b"x")
os.read(os.pipe()[0], 1)
"""


@pytest.fixture
def beating(group):
    """Return a function that starts one watched worker per step, and waits for the heartbeat of each."""

    def start(*steps):
        group.supervisor.watch_hangs(600.0)
        reader, writer = os.pipe()
        group.start(
            *([sys.executable, "-c", BEATS, str(step), str(writer)] for step in steps), pass_fds=[writer]
        )
        os.close(writer)
        for _ in steps:
            assert os.read(reader, 1) == b"x"
        os.close(reader)

    return start


def suspects(group):
    """Wait for the group to stop without a failure, and return the workers that were reported as hung."""
    assert group.end().outcome == "stopped"
    assert set(group.exitcodes().values()) == {-signal.SIGTERM}
    assert not [event for event in group.events if isinstance(event, _core.FailureSeen)]
    return [event for event in group.events if isinstance(event, _core.WorkerHung)]


def test_a_worker_that_lags_behind_is_reported_before_its_hang_limit(group, beating):
    beating(8, 7, 8)
    group.supervisor.stop(POLICY, hung_for=0.0, hung_step=8)
    (told,) = suspects(group)
    assert (told.local_rank, told.ground, told.missed, told.limit) == (1, "behind", "step", 600.0)
    assert {seen.local_rank: seen.heartbeat.step for seen in told.ranks} == {0: 8, 1: 7, 2: 8}


@pytest.mark.parametrize(("hung_for", "step"), [(0.0, None), (10_000.0, 8)])
def test_no_worker_is_blamed_without_evidence(group, beating, hung_for, step):
    beating(8, 7)
    group.supervisor.stop(POLICY, hung_for=hung_for, hung_step=step)
    assert suspects(group) == []


def test_a_stop_with_sigkill_does_not_wait_for_evidence(group, beating):
    beating(7)
    group.supervisor.stop(POLICY, hung_for=0.0, hung_step=8)
    assert group.kill().outcome == "stopped"
    # Either signal can have killed the worker.
    assert group.exitcodes()[0] in (-signal.SIGTERM, -signal.SIGKILL)
    assert [event.local_rank for event in group.events if isinstance(event, _core.WorkerHung)] == [0]


def test_an_invalid_hang_duration_is_refused(group):
    with pytest.raises(ValueError, match="hung_for"):
        group.supervisor.stop(POLICY, hung_for=-1.0)
