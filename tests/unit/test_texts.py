"""What the agent tells the user."""

import re

import pytest

from elasticrs.report.phrases import (
    duration,
    how_it_ended,
    how_the_nursery_ended,
    milliseconds,
    phases,
    restart_line,
    signal_name,
    stop_line,
)


@pytest.mark.parametrize(
    ("exitcode", "text"),
    [
        (3, "exited with code 3"),
        (-9, "died by SIGKILL"),
        (-40, "died by SIG40"),
        (None, "was lost"),
    ],
)
def test_an_end_has_a_name(exitcode, text):
    assert how_it_ended(exitcode) == text


def test_a_nursery_that_the_agent_killed_did_not_just_die():
    assert how_the_nursery_ended(-9, hung=True) == "hung and was killed by the agent"
    assert how_the_nursery_ended(-9, hung=False) == "died by SIGKILL"


def test_the_phases_of_a_restart_that_are_worth_a_word():
    assert (
        phases({"signalling": 0.04, "stopping": 12.34, "starting": 0.05}) == " (stopping 12.3, starting 0.1)"
    )
    assert phases({"signalling": 0.01}) == phases({}) == ""


def test_a_restart_says_what_it_costs():
    line = restart_line("rank 2 (pid 42) died by SIGKILL", 3, 1, 4, "now")
    assert re.search(r"^rank 2 \(pid 42\) died by SIGKILL; 3 others .*restarting, 1 of 4 .*now", line)
    assert "1 other stopped" in restart_line("x", 1, 0, 1, "now")
    assert "stopped" not in restart_line("x", 0, 0, 1, "now")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (61, "1 min 1 s"), (3600 * 27 + 60 * 5, "27 h 5 min")],
)
def test_a_long_span_is_for_people(seconds, text):
    assert duration(seconds) == text


def test_a_stop_says_how_long_it_may_take():
    assert stop_line(15, 15, 30.0).startswith(
        "SIGTERM received: passing it on to the workers, SIGKILL in 30 s"
    )
    assert "again" in stop_line(2, 2, 30.0)
    assert stop_line(2, 9, 0.0) == "second stop request: SIGKILL to all workers"


def test_small_things_are_readable():
    assert signal_name(11) == "SIGSEGV"
    assert milliseconds(12_345_678) == "12.3 ms"
