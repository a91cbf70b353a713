"""Tests for the phrases in the lines that the agent prints."""

import time
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.job.phrases import (
    attempt_text,
    duration,
    how_it_ended,
    how_the_nursery_ended,
    local_time,
    milliseconds,
    phases,
    restart_line,
    signal_name,
    stop_line,
)
from elasticrs._engine.process.signals import how_to_hasten
from elasticrs._engine.supervise.hang_diagnosis import seconds


def test_restart_and_stop_messages_match_the_golden_file(golden):
    ends = [how_it_ended(exitcode) for exitcode in (3, -9, -40, None)]
    nurseries = [how_the_nursery_ended(-9, hung=hung) for hung in (True, False)]
    restarts = [
        restart_line("rank 2 (pid 42) died by SIGKILL", 3, "3 of 4", "now"),
        restart_line("rank 0 (pid 7) exited with code 1", 1, "1 of 1", "now"),
        restart_line("rank 0 (pid 7) exited with code 1", 0, "1 of 1", "now"),
    ]
    stops = [stop_line(signum, signum, 30.0, again=how_to_hasten(signum)) for signum in (15, 2, 1)]
    stops += [stop_line(2, 9, 0.0)]
    stops += [stop_line(15, signum, 30.0, have_exited=True) for signum in (15, 9)]
    texts = {"end of a worker": ends, "end of the nursery": nurseries, "restart": restarts, "stop": stops}
    golden("restarts-and-stops", {title: "\n".join(lines) for title, lines in texts.items()})


@pytest.mark.parametrize("zone", ["UTC0", "NPT-5:45", "EST5EDT,M3.2.0,M11.1.0", "NST3:30"])
@given(time_ns=st.integers(0, 2**62), has_milliseconds=st.booleans())
def test_a_local_time_names_its_moment_in_every_zone(zone, time_ns, has_milliseconds):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        text = local_time(time_ns, "T", has_milliseconds=has_milliseconds)
    time.tzset()
    parsed = datetime.fromisoformat(text.replace("Z", "+00:00"))
    moment = time_ns - time_ns % (1_000_000 if has_milliseconds else 1_000_000_000)
    assert parsed - datetime(1970, 1, 1, tzinfo=timezone.utc) == timedelta(microseconds=moment // 1000)
    assert text.endswith("Z") == (zone == "UTC0")


@pytest.mark.parametrize(
    ("span", "text"), [(9.99, "9.99 s"), (9.996, "10.0 s"), (99.96, "100 s"), (1234, "1,234 s")]
)
def test_seconds_have_three_digits(span, text):
    assert seconds(span) == text


def test_a_time_that_no_calendar_has_is_shown_in_seconds():
    assert local_time(10**30) == f"{10**21} s after 1970"


def test_short_phases_of_a_restart_are_left_out():
    assert (
        phases({"signalling": 0.04, "stopping": 12.34, "starting": 0.05}) == " (stopping 12.3, starting 0.1)"
    )
    assert phases({"signalling": 0.01}) == phases({}) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (61, "1 min 1 s"), (3600 * 27 + 60 * 5, "27 h 5 min")],
)
def test_durations_are_formatted_in_readable_units(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("folder", "text"), [("2", "2"), ("0_r2", "0 of round 2"), ("1_r3_cold", "1 of round 3 (cold)")]
)
def test_an_attempt_is_not_named_by_its_folder(folder, text):
    assert attempt_text(folder) == text


def test_signal_names_and_milliseconds_are_formatted():
    assert signal_name(11) == "SIGSEGV"
    assert milliseconds(12_345_678) == "12.3 ms"
