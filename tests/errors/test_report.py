"""The text that the user sees."""

import json
import os
import pickle
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from elasticrs.agent.attempt import Attempt
from elasticrs.agent.failed_attempt import failures
from elasticrs.job.ranks import NodeShare, assign
from elasticrs.multiprocessing import errors
from elasticrs.multiprocessing.errors import ChildFailedError, ProcessFailure
from elasticrs.workers.plan import Plan

NOW = time.monotonic_ns()
MS = 1_000_000


def recorded(directory: Path, name: str, callstack: str) -> str:
    path = directory / f"{name}.json"
    extra = {"py_callstack": callstack, "timestamp": "10"}
    path.write_text(json.dumps({"message": {"message": "E: x", "extraInfo": extra}}))
    return str(path)


def test_the_layout_is_torchs(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 15)  # so that the longest line is wider than the report gets
    folder.mkdir()
    files = [recorded(folder, name, f"Traceback of {name}:\n  line\nE: x\n") for name in "ab"]
    failures = {rank: ProcessFailure(rank, 100 + rank, 1, file) for rank, file in enumerate(files)}
    when = failures[0].timestamp_isoformat()
    host = os.uname().nodename
    assert str(ChildFailedError("train.py", failures)).split("\n") == [
        "",
        "=" * 60,
        "train.py FAILED",
        "-" * 60,
        "Failures:",
        "[1]:",
        f"  time      : {when}",
        f"  host      : {host}",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : 1 (pid: 101)",
        f"  error_file: {files[1]}",
        "  traceback : Traceback of b:",
        "    line",
        "  E: x",
        "-" * 60,
        "Root Cause (first observed failure):",
        "[0]:",
        f"  time      : {when}",
        f"  host      : {host}",
        "  rank      : 0 (local_rank: 0)",
        "  exitcode  : 1 (pid: 100)",
        f"  error_file: {files[0]}",
        "  traceback : Traceback of a:",
        "    line",
        "  E: x",
        "=" * 60,
    ]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d", when)


def test_a_lone_failure_and_its_signal() -> None:
    text = str(ChildFailedError("bash", {4: ProcessFailure(0, 20314, -15, "")}))
    assert "Failures:\n  <NO_OTHER_FAILURES>\n---" in text
    assert "\n  exitcode  : -15 (pid: 20314)  (SIGTERM)\n  error_file: <N/A>\n" in text


def test_the_lines_can_be_drawn_otherwise() -> None:
    error = ChildFailedError("bash", {0: ProcessFailure(0, 1, -15, "")})
    assert "\n" + "*" * 48 in error.format_msg(boarder_delim="*", section_delim=".")


def stopped(rank: int, sent_signal: int = 15, exitcode: int = -15) -> ProcessFailure:
    return ProcessFailure(rank, 100 + rank, exitcode, "", seen_ns=NOW + 3 * MS, sent_signal=sent_signal)


def test_siblings_that_we_stopped_are_no_failures() -> None:
    failures = {rank: stopped(rank) for rank in (0, 1, 3, 5, 6, 7)}
    failures[2] = ProcessFailure(2, 102, -9, "", seen_ns=NOW)
    text = str(ChildFailedError("train.py", failures))
    assert "Failures:\n  <NO_OTHER_FAILURES>\n" in text
    assert "Stopped by elasticrs after the first failure: ranks 0, 1, 3, 5-7 (SIGTERM)\n" in text
    assert text.count("exitcode") == 1
    assert "[0]:" in text


def test_siblings_that_ended_otherwise_say_how() -> None:
    failures = {0: stopped(0), 1: stopped(1, 9, -9), 2: stopped(2, 15, 1), 3: stopped(3, 15, -11)}
    failures[4] = ProcessFailure(4, 104, 1, "", seen_ns=NOW)
    lines = str(ChildFailedError("train.py", failures)).split("\n")
    start = lines.index("Stopped by elasticrs after the first failure:")
    assert lines[start + 1 : start + 5] == [
        "  rank 0 (SIGTERM)",
        "  rank 1 (SIGKILL, had not exited in time)",
        "  rank 2 (exit code 1 after SIGTERM)",
        "  rank 3 (SIGSEGV after SIGTERM)",
    ]


def test_failures_stand_in_the_order_of_their_ends() -> None:
    failures = {
        rank: ProcessFailure(rank, rank, 1, "", seen_ns=NOW + delay)
        for rank, delay in ((0, 2 * MS + 345_678), (1, 0), (2, 12_000))
    }
    text = str(ChildFailedError("train.py", failures))
    assert re.findall(r"^  rank      : (\d)", text, re.MULTILINE) == ["2", "0", "1"]
    assert re.findall(r"\[(\d)\]:", text) == ["1", "2", "0"]
    assert re.findall(r"time      : \S+\.\d{3} \((.*)\)", text) == [
        "0.012 ms after the root cause",
        "2.346 ms after the root cause",
    ]


def raised(directory: Path, rank: int, raised_ns: int, ended_ns: int) -> ProcessFailure:
    """A worker that recorded an exception, and ended later."""
    path = recorded(directory, str(rank), f"Traceback (most recent call last):\nE: {rank}\n")
    data = json.loads(Path(path).read_text())
    data["elasticrs"] = {"monotonic_ns": raised_ns, "pid": 100 + rank}
    Path(path).write_text(json.dumps(data))
    return ProcessFailure(rank, 100 + rank, 1, path, seen_ns=ended_ns)


def test_order_and_times_are_those_of_the_exceptions_where_ends_came_otherwise(tmp_path: Path) -> None:
    failures = {
        0: raised(tmp_path, 0, NOW + 5 * MS, NOW + 20 * MS),
        1: raised(tmp_path, 1, NOW, NOW + 40 * MS),
        2: raised(tmp_path, 2, NOW + 9 * MS, NOW + 10 * MS),
    }
    text = str(ChildFailedError("train.py", failures))
    assert re.findall(r"^  rank      : (\d)", text, re.MULTILINE) == ["0", "2", "1"]
    assert re.findall(r"\[(\d)\]:", text) == ["1", "2", "0"]
    times = re.findall(r"time      : (\S+)(?: \((\S+) ms after)?", text)
    assert [later for _, later in times] == ["5.000", "9.000", ""]
    seconds = [float(when.rpartition(":")[2]) for when, _ in times]
    assert (seconds[0] - seconds[2]) % 60 == pytest.approx(0.005, abs=0.0021)
    assert "Root Cause (first observed failure):" in text


def test_a_root_cause_that_was_not_observed_first_is_not_called_so() -> None:
    failures = {rank: ProcessFailure(rank, rank, 1, "", seen_ns=NOW + rank * MS) for rank in range(2)}
    failures[1].is_first = True
    text = str(ChildFailedError("train.py", failures))
    assert "first observed" not in text
    assert re.search(r"^Root Cause .*:\n\[1\]:", text, re.MULTILINE)
    assert re.search(r"rank      : 0.*Root Cause.*rank      : 1", text, re.DOTALL)


def test_what_is_known_about_the_cause_follows_torchs_lines(tmp_path: Path) -> None:
    callstack = "Traceback (most recent call last):\n  File x\nValueError: cause\n"
    cause = ProcessFailure(
        0,
        100,
        1,
        recorded(tmp_path, "a", callstack),
        seen_ns=NOW,
        note="probably the kernel's OOM killer (counted)",
        log_paths={"stdout": "/logs/0/stdout.log", "stderr": "/logs/0/stderr.log"},
        stderr_tail=["loading", *callstack.splitlines(), "", "bye"],
    )
    assert str(ChildFailedError("train.py", {0: cause})).split("\n")[-12:] == [
        f"  error_file: {cause.error_file}",
        "  traceback : Traceback (most recent call last):",
        "    File x",
        "  ValueError: cause",
        "  note      : probably the kernel's OOM killer (counted)",
        "  stdout    : /logs/0/stdout.log",
        "  stderr    : /logs/0/stderr.log",
        "  last lines of stderr (3):",
        "    loading",
        "",
        "    bye",
        "=" * 60,
    ]


def test_the_stack_of_a_crash_follows_its_signal(tmp_path: Path) -> None:
    (tmp_path / "error.json.fault").write_text("Fatal Python error: Segmentation fault\n\n  File x\n")
    crash = ProcessFailure(0, 100, -11, str(tmp_path / "error.json"), seen_ns=NOW)
    assert (
        "  traceback : Signal 11 (SIGSEGV) received by PID 100\n"
        "  Fatal Python error: Segmentation fault\n  \n    File x\n"
    ) in str(ChildFailedError("train.py", {0: crash}))


def test_an_exit_without_an_exception_is_called_that() -> None:
    text = str(ChildFailedError("train.sh", {0: ProcessFailure(0, 100, 137, "", seen_ns=NOW)}))
    assert "exit code 137 (a shell's word for SIGKILL), and no exception was recorded" in text
    for likely in ("sys.exit", "os._exit", "HYDRA_FULL_ERROR=1", "--capture-stderr"):
        assert likely in text


def test_whose_stderr_is_kept_is_not_told_to_keep_it() -> None:
    logs = {"stderr": "/logs/0/stderr.log"}
    failure = ProcessFailure(0, 100, 1, "", seen_ns=NOW, log_paths=logs, stderr_tail=["ValueError: x"])
    text = str(ChildFailedError("train.py", {0: failure}))
    assert "HYDRA_FULL_ERROR=1" in text
    assert "--capture-stderr" not in text


def test_a_cause_outside_of_the_worker_is_given() -> None:
    lost = ProcessFailure(0, 100, -9, "", seen_ns=NOW, cause="nursery killed by SIGKILL")
    assert "  traceback : nursery killed by SIGKILL\n" in str(ChildFailedError("train.py", {0: lost}))


def test_an_equal_traceback_is_shown_once(tmp_path: Path) -> None:
    callstack = "Traceback:\n a\n b\n c\nE: x\n"
    failures = {
        rank: ProcessFailure(rank, rank, 1, recorded(tmp_path, str(rank), callstack), seen_ns=NOW + rank)
        for rank in range(3)
    }
    text = str(ChildFailedError("train.py", failures))
    assert text.count("Traceback:") == 1
    assert text.count("  traceback : the same as [0]\n") == 2


def test_ranks_that_failed_alike_share_one_entry(tmp_path: Path) -> None:
    def failure(rank: int, callstack: str) -> ProcessFailure:
        return ProcessFailure(rank, rank, 1, recorded(tmp_path, str(rank), callstack), seen_ns=NOW + rank)

    lost = "Traceback:\n a\n b\nRuntimeError: Connection closed by peer [127.0.0.1]:{}\n"
    callstacks = {0: "Traceback:\n a\nE: x\n", 16: "Traceback:\n a\nE: y\n"}
    callstacks |= {rank: lost.format(4000 + 7919 * rank) for rank in range(1, 16)}
    text = str(ChildFailedError("train.py", {rank: failure(rank, callstacks[rank]) for rank in range(17)}))
    assert len(text.splitlines()) < 45
    assert re.findall(r"^  rank      : (\d+)", text, re.MULTILINE) == ["1", "16", "0"]
    assert text.count("closed by peer") == 1
    assert re.findall(r"^  like it   : (.*), until \S+ \((\S+) ms after", text, re.MULTILINE) == [
        ("ranks 2-15", "0.000")
    ]


def test_a_traceback_of_a_child_or_long_before_the_end_is_marked(tmp_path: Path) -> None:
    path = recorded(tmp_path, "a", "Traceback\n")
    data = json.loads(Path(path).read_text())
    data["elasticrs"] = {"monotonic_ns": NOW - 2500 * MS, "pid": 101}
    Path(path).write_text(json.dumps(data))
    text = str(ChildFailedError("x", {0: ProcessFailure(0, 100, -9, path, seen_ns=NOW)}))
    assert "  note      : the traceback is of process 101, which the worker had started\n" in text
    assert "  note      : the traceback was recorded 2.500 s before SIGKILL ended the worker\n" in text


def test_an_unreadable_error_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text('{"message": {"mess')
    text = str(ChildFailedError("x", {0: ProcessFailure(0, 100, 1, str(path), seen_ns=NOW)}))
    assert "its error file cannot be read (Unterminated string" in text


def test_the_error_handler_may_add_to_a_signals_message(tmp_path: Path) -> None:
    handler = mock.MagicMock()
    handler.maybe_enrich_signal_failure_message.side_effect = lambda message, _: message + "\n[device fault]"
    failure = ProcessFailure(0, 997, -6, "")
    with mock.patch.object(errors, "get_error_handler", return_value=handler):
        text = str(ChildFailedError("trainer", {0: failure}))
    assert "received by PID 997\n  [device fault]\n" in text
    assert "[device fault]" not in failure.message
    handler.maybe_enrich_signal_failure_message.assert_called_once_with(mock.ANY, "<N/A>")


def test_an_error_handler_that_fails_does_not_cost_the_report() -> None:
    handler = mock.MagicMock()
    handler.maybe_enrich_signal_failure_message.side_effect = RuntimeError("of the handler")
    with mock.patch.object(errors, "get_error_handler", return_value=handler):
        text = str(ChildFailedError("trainer", {0: ProcessFailure(0, 997, -6, "")}))
    assert "Signal 6 (SIGABRT) received by PID 997\n" in text
    assert "of the handler" in text


def test_an_error_needs_a_failure() -> None:
    with pytest.raises(AssertionError):
        ChildFailedError("train.py", {})


def test_the_error_survives_pickling() -> None:
    error = ChildFailedError("train.py", {0: ProcessFailure(0, 1, -9, "")})
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.name, copy.failures, str(copy)) == (error.name, error.failures, str(error))


def test_an_end_that_nobody_saw_is_unknown_and_no_code_is_made_up() -> None:
    attempt = Attempt(0, 0, Plan(assign([NodeShare("default", 1)], 0), "localhost", 1))
    gone = SimpleNamespace(local_rank=0, pid=100, exitcode=None, sent_signal=None, seen_ns=NOW)
    attempt.exits[0] = cast("Any", gone)
    found = failures(attempt)
    assert found[0].exitcode is None
    lines = str(ChildFailedError("train.py", found)).split("\n")
    assert "  exitcode  : unknown (pid: 100)" in lines
    assert "  traceback : the worker is gone, and its exit status is unknown" in lines


@pytest.mark.parametrize(
    ("exception", "advice"),
    [
        ("OSError: [Errno 28] No space left on device: 'a.pt'", "a file system is full"),
        ("DistNetworkError: … name: EADDRINUSE, message: address already in use", "listens on that port"),
        ("OSError: [Errno 2] No such file or directory: 'a.pt'", None),
    ],
)
def test_an_error_of_the_machine_gets_a_note(tmp_path: Path, exception: str, advice: str | None) -> None:
    path = recorded(tmp_path, "a", f"Traceback (most recent call last):\n  File x\n{exception}\n")
    text = str(ChildFailedError("x", {0: ProcessFailure(0, 100, 1, path, seen_ns=NOW)}))
    notes = re.findall(r"  note      : (.*)", text)
    assert [advice in note for note in notes] == [True] if advice else notes == []


@pytest.mark.parametrize(
    ("sent_signal", "note", "has_note"), [(None, None, True), (9, None, False), (None, "OOM", False)]
)
def test_a_sigkill_from_outside_is_called_that(
    sent_signal: int | None, note: str | None, has_note: bool
) -> None:
    failure = ProcessFailure(0, 100, -9, "", seen_ns=NOW, sent_signal=sent_signal, note=note)
    text = str(ChildFailedError("x", {0: failure}))
    assert ("batch system" in text) is has_note
