"""The failure report. ``tests/golden/failure-report.txt`` contains whole reports."""

import errno
import json
import os
import pickle
import re
import subprocess
import time
from pathlib import Path
from unittest import mock

import pytest
from helpers.attempts import exited

from elasticrs._engine.failures.report import painted
from elasticrs._engine.inside.error_file import error_document
from elasticrs._engine.process.console import Console
from elasticrs._engine.supervise.attempt import Attempt
from elasticrs._engine.supervise.failed_attempt import failures
from elasticrs._engine.workers.plan import NodeShare, Plan, assign
from elasticrs.multiprocessing import errors
from elasticrs.multiprocessing.errors import ChildFailedError, ProcessFailure

NOW = time.monotonic_ns()
MS = 1_000_000


def recorded(directory: Path, name: str, callstack: str) -> str:
    path = directory / f"{name}.json"
    extra = {"py_callstack": callstack, "timestamp": "10"}
    path.write_text(json.dumps({"message": {"message": "E: x", "extraInfo": extra}}))
    return str(path)


def stopped(rank: int, sent_signal: int = 15, exitcode: int = -15) -> ProcessFailure:
    return ProcessFailure(rank, 100 + rank, exitcode, "", seen_ns=NOW + 3 * MS, sent_signal=sent_signal)


def recorded_in(directory: Path, name: str, monotonic_ns: int, pid: int, callstack: str) -> str:
    path = Path(recorded(directory, name, callstack))
    data = json.loads(path.read_text())
    data["elasticrs"] = {"monotonic_ns": monotonic_ns, "pid": pid}
    path.write_text(json.dumps(data))
    return str(path)


def test_failure_reports_match_the_golden_file(tmp_path, golden):
    def report(name: str, *failures: ProcessFailure) -> str:
        return str(ChildFailedError(name, {failure.local_rank: failure for failure in failures})).lstrip("\n")

    callstack = "Traceback (most recent call last):\n  File x\nValueError: cause\n"
    folder = tmp_path / ("long" * 15)  # so that the longest line is wider than the lines that frame a report
    folder.mkdir()
    files = [recorded(folder, name, f"Traceback of {name}:\n  line\nE: x\n") for name in "ab"]
    details = ProcessFailure(
        0,
        100,
        1,
        recorded(tmp_path, "details", callstack),
        seen_ns=NOW,
        note="probably the kernel's OOM killer (counted)",
        log_paths={"stdout": "/logs/0/stdout.log", "stderr": "/logs/0/stderr.log"},
        stderr_tail=["loading", *callstack.splitlines(), "", "bye"],
    )
    siblings = [stopped(0), stopped(1, 9, -9), stopped(2, 15, 1), stopped(3, 15, -11)]
    (tmp_path / "error.json.fault").write_text("Fatal Python error: Segmentation fault\n\n  File x\n")
    (tmp_path / "unreadable.json").write_text('{"message": {"mess')
    child = recorded_in(tmp_path, "child", NOW - 2500 * MS, 101, callstack)
    full = callstack.replace("ValueError: cause", "OSError: [Errno 28] No space left on device: 'a.pt'")
    texts = {
        "torch's lines": report("a.py", *(ProcessFailure(n, 100 + n, 1, files[n]) for n in range(2))),
        "a signal": report("bash", ProcessFailure(0, 20314, -15, "")),
        "all that is known of a cause": report("a.py", details),
        "other ranks that were stopped": report(
            "a.py", *siblings, ProcessFailure(4, 104, 1, "", seen_ns=NOW)
        ),
        "only stopped by SIGTERM": report(
            "a.py", *map(stopped, (0, 1, 3, 5, 6, 7)), ProcessFailure(2, 102, -9, "", seen_ns=NOW)
        ),
        "a crash": report("a.py", ProcessFailure(0, 100, -11, str(tmp_path / "error.json"), seen_ns=NOW)),
        "an exit code": report("a.sh", ProcessFailure(0, 100, 137, "", seen_ns=NOW)),
        "a SIGKILL from outside": report("a.py", ProcessFailure(0, 100, -9, "", seen_ns=NOW)),
        "a cause outside of the worker": report(
            "a.py", ProcessFailure(0, 100, -9, "", cause="the nursery died")
        ),
        "an error of a child": report("a.py", ProcessFailure(0, 100, -9, child, seen_ns=NOW)),
        "an error file that cannot be read": report(
            "a.py", ProcessFailure(0, 100, 1, str(tmp_path / "unreadable.json"), seen_ns=NOW)
        ),
        "a full disk": report(
            "a.py", ProcessFailure(0, 100, 1, recorded(tmp_path, "full", full), seen_ns=NOW)
        ),
    }
    assert texts["torch's lines"].splitlines()[0] == "=" * 60
    golden("failure-report", texts)


def test_format_msg_accepts_other_delimiters():
    error = ChildFailedError("bash", {0: ProcessFailure(0, 1, -15, "")})
    assert "\n" + "*" * 48 in error.format_msg(boarder_delim="*", section_delim=".")


def test_failures_are_shown_in_the_order_of_their_exits():
    failures = {
        rank: ProcessFailure(rank, rank, 1, "", seen_ns=NOW + delay)
        for rank, delay in ((0, 2 * MS + 345_678), (1, 0), (2, 12_000))
    }
    failures[2].cause, failures[0].cause = "first", "second"
    text = str(ChildFailedError("train.py", failures))
    assert re.search(r"^  rank      : 1 ", text, re.MULTILINE)
    assert re.findall(r"\[(\d)\]:", text) == ["0", "1", "2"]
    assert re.findall(r"^  \[\d\]: rank (\d), (\S+ ms) later: (.*)$", text, re.MULTILINE) == [
        ("2", "0.012 ms", "first"),
        ("0", "2.346 ms", "second"),
    ]


def raised(directory: Path, rank: int, raised_ns: int, ended_ns: int) -> ProcessFailure:
    """Return the failure of a worker that recorded an exception and exited later."""
    callstack = f"Traceback (most recent call last):\nE: {rank}\n"
    path = recorded_in(directory, str(rank), raised_ns, 100 + rank, callstack)
    return ProcessFailure(rank, 100 + rank, 1, path, seen_ns=ended_ns)


def test_failures_are_ordered_by_the_times_of_their_exceptions(tmp_path):
    failures = {
        0: raised(tmp_path, 0, NOW + 5 * MS, NOW + 20 * MS),
        1: raised(tmp_path, 1, NOW, NOW + 40 * MS),
        2: raised(tmp_path, 2, NOW + 9 * MS, NOW + 10 * MS),
    }
    text = str(ChildFailedError("train.py", failures))
    assert re.search(r"^  rank      : 1 ", text, re.MULTILINE)
    assert re.findall(r"^  \[\d\]: ranks? (.*), (.*) ms later", text, re.MULTILINE) == [
        ("0, 2", "5.000 to 9.000")
    ]
    when = re.search(r"time      : (\S+)", text)[1]
    second = (failures[1].wall_ns - 40 * MS) / 1e9
    assert (float(re.search(r":(\d\d\.\d{3})", when)[1]) - second + 30) % 60 == pytest.approx(30, abs=0.0021)
    assert "first observed" in text


def test_a_root_cause_not_observed_first_is_not_labelled_first_observed():
    failures = {rank: ProcessFailure(rank, rank, 1, "", seen_ns=NOW + rank * MS) for rank in range(2)}
    failures[1].is_first = True
    text = str(ChildFailedError("train.py", failures))
    assert "first observed" not in text
    assert re.search(r"^Root Cause .*:\n\[1\]:(\n.*){3}rank      : 1 ", text, re.MULTILINE)
    assert re.search(r"^  \[0\]: rank 0, 1\.000 ms earlier", text, re.MULTILINE)
    assert "all nodes" not in text
    failures[0].host = "another"
    assert "all nodes" in str(ChildFailedError("train.py", failures))


def test_a_worker_with_captured_stderr_gets_no_hint_to_capture_it():
    logs = {"stderr": "/logs/0/stderr.log"}
    failure = ProcessFailure(0, 100, 1, "", seen_ns=NOW, log_paths=logs, stderr_tail=["ValueError: x"])
    text = str(ChildFailedError("train.py", {0: failure}))
    assert "HYDRA_FULL_ERROR=1" in text
    assert "--capture-stderr" not in text


def test_ranks_with_the_same_failure_share_a_line_and_only_the_root_cause_has_a_traceback(tmp_path):
    def failure(rank: int, callstack: str) -> ProcessFailure:
        folder = tmp_path / str(rank)
        folder.mkdir()
        return ProcessFailure(rank, rank, 1, recorded(folder, "error", callstack), seen_ns=NOW + rank)

    lost = "Traceback:\n a\n b\nRuntimeError: Connection closed by peer [127.0.0.1]:{}\n"
    callstacks = {0: "Traceback:\n a\nE: x\n", 16: "Traceback:\n a\nE: y\n"}
    callstacks |= {rank: lost.format(4000 + 7919 * rank) for rank in range(1, 16)}
    failures = {rank: failure(rank, callstacks[rank]) for rank in range(17)}
    text = str(ChildFailedError("train.py", failures))
    assert len(text.splitlines()) < 24  # the height of a small terminal
    assert re.findall(r"^  rank      : (\d+)", text, re.MULTILINE) == ["0"]
    assert text.count("Traceback") == text.count("closed by peer") == 1
    assert re.findall(r"^  \[\d+\]: (ranks? [-\d]+), ", text, re.MULTILINE) == ["ranks 1-15", "rank 16"]
    (files,) = re.findall(r"^  traceback in (.*)", text, re.MULTILINE)
    listed = subprocess.run(["bash", "-c", f"ls {files}"], capture_output=True, text=True, check=True).stdout
    assert listed.split() == sorted(failures[rank].error_file for rank in range(1, 17))


@pytest.mark.parametrize(
    ("delays", "span"), [((1, 2), "1.000 to 2.000 ms later"), ((-2, -1), "1.000 to 2.000 ms earlier")]
)
def test_a_line_of_several_failures_shows_the_nearest_and_the_farthest(delays, span):
    failures = {
        rank: ProcessFailure(rank, rank, 1, "", seen_ns=NOW + delay * MS)
        for rank, delay in enumerate((0, *delays))
    }
    failures[0].is_first = True
    assert f"ranks 1, 2, {span}" in str(ChildFailedError("train.py", failures))


def test_the_report_is_bounded_however_long_texts_are_and_however_many_ranks_fail(tmp_path):
    long = "Traceback (most recent call last):\n  File x\nValueError: " + "y" * 100_000 + "\nz" * 100_000
    path = recorded(tmp_path, "long", long)
    failures = {0: ProcessFailure(0, 100, 1, path, seen_ns=NOW)}
    for rank in range(1, 2000):
        failures[rank] = ProcessFailure(rank, 100, rank % 250 + 1, "", seen_ns=NOW + rank, cause="x" * rank)
    text = str(ChildFailedError("train.py", failures))
    assert len(text.splitlines()) < 160
    assert len(text) < 20_000
    assert "ValueError: yyy" in text
    assert re.search(r"^  and 1987 more$", text, re.MULTILINE)


def test_the_error_handler_can_extend_the_message_of_a_signal_failure(tmp_path):
    handler = mock.MagicMock()
    handler.maybe_enrich_signal_failure_message.side_effect = lambda message, _: message + "\n[device fault]"
    failure = ProcessFailure(0, 997, -6, "")
    with mock.patch.object(errors, "get_error_handler", return_value=handler):
        text = str(ChildFailedError("trainer", {0: failure}))
    assert re.search(r"  traceback : .* 997\n  \[device fault\]\n", text)
    assert "[device fault]" not in failure.message
    handler.maybe_enrich_signal_failure_message.assert_called_once_with(mock.ANY, "<N/A>")


def test_a_failing_error_handler_does_not_prevent_the_report():
    handler = mock.MagicMock()
    handler.maybe_enrich_signal_failure_message.side_effect = RuntimeError("of the handler")
    with mock.patch.object(errors, "get_error_handler", return_value=handler):
        text = str(ChildFailedError("trainer", {0: ProcessFailure(0, 997, -6, "")}))
    assert "(SIGABRT)" in text
    assert "of the handler" in text


def test_child_failed_error_requires_a_failure():
    with pytest.raises(AssertionError):
        ChildFailedError("train.py", {})


def test_child_failed_error_survives_pickling():
    error = ChildFailedError("train.py", {0: ProcessFailure(0, 1, -9, "")})
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.name, copy.failures, str(copy)) == (error.name, error.failures, str(error))


def test_an_unobserved_exit_is_shown_as_unknown():
    attempt = Attempt(0, 0, Plan(assign([NodeShare("default", 1)], 0), "localhost", 1))
    exited(attempt, 0, None)
    found = failures(attempt)
    assert found[0].exitcode is None
    lines = str(ChildFailedError("train.py", found)).split("\n")
    assert "  exitcode  : unknown (pid: 100)" in lines
    (line,) = [line for line in lines if line.startswith("  traceback : ")]
    assert "unknown" in line


@pytest.mark.parametrize(("number", "advice"), [(errno.ENOSPC, "file system"), (errno.ENOENT, None)])
def test_a_recorded_error_number_decides_about_advice_not_the_text(tmp_path, number, advice):
    """Report a missing file as such, even if its name is the text of another error."""
    error = OSError(number, "not found", os.strerror(errno.EADDRINUSE))
    path = tmp_path / "error.json"
    path.write_text(error_document(error, "hook"))
    text = str(ChildFailedError("x", {0: ProcessFailure(0, os.getpid(), 1, str(path), seen_ns=NOW)}))
    notes = re.findall(r"  note      : (.*)", text)
    assert [advice in note for note in notes] == [True] if advice else notes == []


@pytest.mark.parametrize(
    ("exception", "advice"),
    [
        ("OSError: [Errno 28] No space left on device: 'a.pt'", "file system"),
        ("DistNetworkError: … name: EADDRINUSE, message: address already in use", "port"),
        ("OSError: [Errno 2] No such file or directory: 'a.pt'", None),
    ],
)
def test_a_full_disk_or_port_conflict_gets_a_note_with_advice(tmp_path, exception, advice):
    path = recorded(tmp_path, "a", f"Traceback (most recent call last):\n  File x\n{exception}\n")
    text = str(ChildFailedError("x", {0: ProcessFailure(0, 100, 1, path, seen_ns=NOW)}))
    notes = re.findall(r"  note      : (.*)", text)
    assert [advice in note for note in notes] == [True] if advice else notes == []


def test_a_missing_module_gets_a_note_with_the_interpreter(tmp_path):
    path = Path(recorded(tmp_path, "a", "Traceback (most recent call last):\nModuleNotFoundError: x\n"))
    facts = {"exception": "builtins.ModuleNotFoundError", "python": "/opt/python"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "elasticrs": {"failure": facts}}))
    text = str(ChildFailedError("x", {0: ProcessFailure(0, 100, 1, str(path), seen_ns=NOW)}))
    assert re.search("  note      : .*/opt/python.*PYTHON_EXEC", text)


def test_the_report_has_colours_only_on_a_terminal(monkeypatch):
    text = str(ChildFailedError("x", {0: ProcessFailure(0, 1, -9, "")})) + "\nverdict: transient\n"
    assert re.sub("\x1b\\[[0-9;]*m", "", painted(text)) == text

    def printed(fds: tuple[int, int]) -> str:
        end, fd = fds
        Console(fd, "none").write(text, 1, paint=painted)
        shown = os.read(end, 1 << 16).decode()
        os.close(end)
        os.close(fd)
        return shown

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31mRoot Cause" in printed(os.openpty())
    assert "\x1b" not in printed(os.pipe())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in printed(os.openpty())


@pytest.mark.parametrize(
    ("sent_signal", "note", "has_note"), [(None, None, True), (9, None, False), (None, "OOM", False)]
)
def test_a_sigkill_from_outside_gets_a_note(sent_signal, note, has_note):
    failure = ProcessFailure(0, 100, -9, "", seen_ns=NOW, sent_signal=sent_signal, note=note)
    text = str(ChildFailedError("x", {0: failure}))
    assert ("batch system" in text) is has_note


def test_a_worker_whose_rank_was_taken_over_has_no_rank_in_the_report():
    """The key of such a worker is a negative placeholder."""
    failures = {-3: ProcessFailure(2, 102, 1, "", seen_ns=NOW), 0: stopped(0), -2: stopped(1)}
    text = ChildFailedError("x", failures).format_msg()
    assert not re.search(r"rank\S* *:? -\d", text)
    assert "local_rank: 2" in text
    assert "local rank 1" in text


# --- reports of jobs whose workers use neither `@record` nor redirected output ---


def test_an_exit_without_an_error_record_is_the_cause_of_a_lost_peer_error(launch, worker_script, tmp_path):
    os.mkfifo(tmp_path / "recorded")
    script = worker_script(f"""
        import atexit, os, signal
        recorded = {str(tmp_path / "recorded")!r}
        if os.environ["RANK"] == "1":
            open(recorded).read(1)
            os._exit(7)

        @atexit.register
        def tell():
            with open(recorded, "w") as file:
                file.write("x")
            signal.pause()

        raise ConnectionResetError(104, "Connection reset by peer")
    """)
    job = launch("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script)
    assert job.wait() == 1
    assert re.search(r"rank 1 \(pid \d+\) .*\b7; restarting", job.stderr)
    root = job.stderr[job.stderr.index("Root Cause") :]
    assert "  rank      : 1 (local_rank: 1)\n" in root


def test_an_error_file_that_could_not_be_written_is_reported_as_empty(launch, worker_script, tmp_path):
    # The worker can open the error file but not write to it, as on a full disk.
    script = worker_script(
        """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    raise ValueError("no such batch")
    """
    )
    job = launch("--standalone", "--log-dir", tmp_path / "logs", script).exits(1)
    root = job.stderr[job.stderr.index("Root Cause") :]
    assert re.search("  traceback : exit code 1; .*error file.*empty", root)
    (error_file,) = (tmp_path / "logs").rglob("error.json*")
    assert error_file.read_text() == ""


def test_control_characters_in_an_exception_text_are_escaped(launch, worker_script):
    script = worker_script("""
        raise ValueError("\\x1b]0;title\\x07\\x1b[2J")
    """)
    job = launch("--redirects=3", "--role=a\x1b[1mb", "--max-restarts=1", script)
    assert job.wait() == 1
    assert "\x1b" not in job.stderr
    assert "\x07" not in job.stderr
    assert "\\x1b]0;title\\x07" in job.stderr


def test_only_a_worker_without_a_cause_of_its_own_was_killed_at_the_stop_deadline():
    """A hung worker gets SIGKILL at once, although another rank may be the root cause."""
    hung, late = stopped(1, 9, -9), stopped(2, 9, -9)
    hung.cause = "hung: no heartbeat for 4.00 s"
    first = ProcessFailure(0, 100, 1, "", seen_ns=NOW)
    text = str(ChildFailedError("train.py", {0: first, 1: hung, 2: late}))
    assert "rank 1 (SIGKILL)" in text
    assert "rank 2 (SIGKILL at the stop deadline)" in text
