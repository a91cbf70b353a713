"""Tests for the phrases in the lines that the agent prints."""

import time
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.job.phrases import (
    COLUMNS,
    attempt_text,
    duration,
    folded,
    how_it_ended,
    how_the_nursery_ended,
    local_time,
    longest_phase,
    milliseconds,
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
        restart_line("rank 2 (pid 42) died by SIGKILL", "3 of 4"),
        restart_line("rank 0 (pid 7) exited with code 1", "1 of 1", 5.0),
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


def test_only_the_longest_phase_of_a_restart_is_shown():
    assert longest_phase({"signalling": 0.04, "stopping": 12.34, "starting": 0.05}) == " (stopping 12.3)"
    assert longest_phase({"signalling": 0.01}) == longest_phase({}) == ""


CLAUSES = "rank 1 (pid 17664): hung: no heartbeat for 1.99 s (limit 2 s; another rank has reached its limit)"


def test_lines_are_folded_at_semicolons_and_spaces():
    short = "x" * (COLUMNS - 11)
    assert folded(short, "elasticrs: ", 0) == [f"elasticrs: {short}"]
    text = f"{CLAUSES}; 3 of 4 ranks wait in all_reduce #156 of the default group (train.py:47); restarting"
    assert folded(text, "elasticrs: ", 200) == [
        f"elasticrs: {CLAUSES};",
        "    3 of 4 ranks wait in all_reduce #156 of the default group (train.py:47); restarting",
    ]
    words = folded("word " * 60, "elasticrs: ", 0)
    assert all(COLUMNS - 5 < len(line) <= COLUMNS for line in words[:-1])
    assert all(75 < len(line) <= 80 for line in folded("word " * 60, "elasticrs: ", 80)[:-1])
    path = "/path" * 40
    assert folded(f"logs in {path} of", "elasticrs: ", 0) == ["elasticrs: logs in", f"    {path}", "    of"]
    assert folded(path, "elasticrs: ", 0) == [f"elasticrs: {path}"]


@given(
    st.text(alphabet="ab; ", max_size=400),
    st.sampled_from(["elasticrs: ", "elasticrs[gpu009:4686 group 0]: "]),
    st.sampled_from([0, 1, 20, 80, 300]),
)
def test_a_folded_text_has_the_same_words(text, start, width):
    lines = folded(text, start, width)
    assert " ".join(lines).split() == f"{start}{text}".split()
    assert all(
        len(line) <= min(width or COLUMNS, COLUMNS) or " " not in line.removeprefix(start).strip()
        for line in lines
    )


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
