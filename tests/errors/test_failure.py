"""Reading of error files by the agent."""

import errno
import http.client
import json
import pickle
import re
import socket
import ssl
import time
import urllib.error
from concurrent import futures
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.failures.failure import discard_unused_files, fault_file
from elasticrs._engine.inside import flight
from elasticrs._engine.inside.error_file import error_document, failure_facts
from elasticrs.multiprocessing.errors import ProcessFailure

NESTED = {"message": {"message": "E: x", "extraInfo": {"py_callstack": "stack", "timestamp": "12"}}}


def write(directory: Path, content: object) -> str:
    path = directory / "error.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_failures_do_not_share_error_file_data():
    ProcessFailure(0, 1, 1, "")
    assert ProcessFailure(0, 1, -9, "").error_file_data == {"message": "<NONE>"}


HALF = json.dumps(NESTED)[:40]
MALFORMED: list[object] = [
    HALF,
    "null",
    "[]",
    "7",
    {"unknown_key": "unknown_value"},
    {"message": {}},
    {"message": {"extraInfo": 3}},
    {"message": None},
    {"message": "m", "timestamp": "noon"},
    {"message": "m", "timestamp": float("inf")},
    {"message": {"message": "m", "extraInfo": {"timestamp": []}}},
    "[" * 100_000,
]


@pytest.mark.parametrize("content", MALFORMED, ids=range(len(MALFORMED)))
@pytest.mark.parametrize("exitcode", [1, -9])
def test_a_malformed_error_file_is_reported_without_an_exception(tmp_path, content, exitcode):
    path = write(tmp_path, content)
    failure = ProcessFailure(0, 5, exitcode, path)
    assert failure.error_file == path
    how = "exit code 1; " if exitcode > 0 else r"Signal 9 \(SIGKILL\).*; "
    assert re.match(how + r".*error file.* \(", str(failure.message))


@pytest.mark.parametrize(
    ("exitcode", "how"), [(1, "exit code 1"), (-9, "Signal 9 (SIGKILL)"), (None, "unknown")]
)
def test_an_empty_error_file_is_reported_as_empty(tmp_path, exitcode, how):
    failure = ProcessFailure(0, 5, exitcode, write(tmp_path, ""))
    before, _, after = failure.message.partition("; ")
    assert before.startswith(how)
    assert "error file" in after
    assert "empty" in after


def test_a_huge_error_file_is_not_read_into_memory(tmp_path):
    path = tmp_path / "error.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    failure = ProcessFailure(0, 5, 1, str(path))
    assert f"{1 << 40:,} bytes" in str(failure.message)


@pytest.mark.parametrize("character", ["x", "\\", "é", "😀"])
@pytest.mark.parametrize("shift", range(6))
def test_of_a_large_error_file_the_beginning_and_the_facts_are_read(tmp_path, character, shift):
    text = "ValueError: " + "x" * shift + character * 600_000
    facts = {"exception": "builtins.ValueError", "place": "train.py:4", "is_retryable": False}
    own = {"time_ns": 1, "monotonic_ns": 17, "pid": 5, "failure": facts}
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": "3"}}
    failure = ProcessFailure(0, 5, 1, write(tmp_path, json.dumps({"message": message, "elasticrs": own})))
    said = failure.message["message"]
    assert said.split("\n")[-1].startswith(f"ValueError: {'x' * shift}{character}")
    assert len(said) < 2_000
    assert (failure.recorded_ns, failure.exception, failure.place) == (
        17,
        "builtins.ValueError",
        "train.py:4",
    )
    assert not failure.is_retryable


def test_a_long_text_keeps_its_beginning_and_its_end(tmp_path):
    text = "Traceback" + "\n" * 100_000 + "ValueError: the end"
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": "3"}}
    failure = ProcessFailure(0, 5, 1, write(tmp_path, json.dumps({"message": message})))
    for shown in (failure.message["message"], failure.message["extraInfo"]["py_callstack"]):
        assert shown.startswith("Traceback")
        assert shown.endswith("ValueError: the end")
        assert len(shown) < 70_000


def test_an_unobserved_exit_has_no_exit_code():
    failure = ProcessFailure(0, 5, None, "", seen_ns=1, cause="unknown")
    assert failure.exitcode is None
    assert (failure.signal_number(), failure.signal_name()) == (0, "<N/A>")
    assert failure.message == "unknown"


def test_an_error_file_with_invalid_utf8_is_reported(tmp_path):
    path = tmp_path / "error.json"
    path.write_bytes(b"\xff\xfe{")
    assert "error file" in str(ProcessFailure(0, 5, 1, str(path)).message)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["message", "extraInfo", "timestamp"]), inner)
    ),
)


@given(content=json_values | st.text(), exitcode=st.sampled_from([1, -11]))
def test_no_error_file_content_raises_an_exception(tmp_path_factory, content, exitcode):
    path = tmp_path_factory.getbasetemp() / "error.json"
    path.write_text(
        content if isinstance(content, str) else json.dumps(content), encoding="utf-8", errors="replace"
    )
    failure = ProcessFailure(0, 5, exitcode, str(path))
    assert failure.message


def test_elasticrs_fields_in_an_error_file_are_read(tmp_path):
    ours = {"time_ns": 1, "monotonic_ns": 77, "pid": 5, "written_by": "hook"}
    failure = ProcessFailure(0, 5, 1, write(tmp_path, {**NESTED, "elasticrs": ours}))
    assert (failure.recorded_ns, failure.recorded_pid) == (77, 5)


def test_the_last_stack_in_a_fault_file_is_used(tmp_path):
    path = str(tmp_path / "error.json")
    Path(fault_file(path)).write_text(
        "Fatal Python error: of a child\n\nFatal Python error: own\n\n  File x\n\nExtension modules: a, b\n"
    )
    assert ProcessFailure(0, 5, -11, path).stack == "Fatal Python error: own\n\n  File x"
    assert ProcessFailure(0, 5, -9, path).stack is None
    assert ProcessFailure(0, 5, 1, path).stack is None


def test_the_stack_of_a_crash_omits_the_thread_of_elasticrs(tmp_path):
    path = str(tmp_path / "error.json")
    own = f'Thread 0x1 (most recent call first):\n  File "{flight.__file__}", line 9 in _wait_for_request\n'
    users = '  File "train.py", line 3 in <module>'
    Path(fault_file(path)).write_text(f"Fatal Python error: x\n\n{own}\nCurrent thread 0x2:\n{users}\n")
    stack = ProcessFailure(0, 5, -11, path).stack
    assert stack == f"Fatal Python error: x\n\nCurrent thread 0x2:\n{users}"


def test_only_empty_fault_files_are_discarded(tmp_path):
    path = str(tmp_path / "error.json")
    discard_unused_files(path)
    Path(fault_file(path)).touch()
    discard_unused_files(path)
    assert list(tmp_path.iterdir()) == []
    Path(fault_file(path)).write_text("Fatal")
    discard_unused_files(path)
    assert Path(fault_file(path)).exists()


def test_the_wall_time_is_derived_from_the_monotonic_time():
    second = 1_000_000_000
    failure = ProcessFailure(0, 5, -9, "", seen_ns=time.monotonic_ns() - 3600 * second)
    assert abs(time.time_ns() - 3600 * second - failure.wall_ns) < second
    assert failure.timestamp == failure.wall_ns // second


def test_process_failures_compare_and_pickle_by_value(tmp_path):
    path = write(tmp_path, NESTED)
    failure, same = ProcessFailure(0, 5, 1, path, note="n"), ProcessFailure(0, 5, 1, path)
    assert failure == same
    assert failure != ProcessFailure(1, 5, 1, path)
    assert failure != "failure"
    assert pickle.loads(pickle.dumps(failure)) == failure
    assert repr(failure).startswith("ProcessFailure(local_rank=0, pid=5, exitcode=1, error_file='")
    with pytest.raises(TypeError):
        hash(failure)
    match failure:
        case ProcessFailure(0, 5, exitcode, _):
            assert exitcode == 1


MARKS = [
    {"message": "m", "timestamp": 1, "retryable": "false"},
    {"message": "m", "timestamp": 1, "retryable": " False "},
    {"message": {"message": "m", "extraInfo": {"timestamp": "1", "retryable": "False"}}},
    {"message": {"retryable": False, "message": "m", "extraInfo": {"timestamp": "1"}}},
    {"retryable": False},
    {"message": {"message": "m", "retryable": False}},
    {"message": None, "retryable": "false"},
    {"message": "m", "timestamp": "noon", "retryable": False},
]


@pytest.mark.parametrize("content", MARKS, ids=range(len(MARKS)))
def test_retryable_false_in_an_error_file_is_accepted_in_every_form(tmp_path, content):
    failure = ProcessFailure(0, 5, 1, write(tmp_path, content))
    assert not failure.is_retryable
    assert not failure.more_notes


@pytest.mark.parametrize(
    ("value", "is_clear"),
    [(True, True), ("True", True), ("no", False), (0, False), (None, False), ([], False)],
)
def test_an_invalid_retryable_value_is_reported_and_ignored(tmp_path, value, is_clear):
    failure = ProcessFailure(0, 5, 1, write(tmp_path, {"message": "m", "timestamp": 1, "retryable": value}))
    assert failure.is_retryable
    assert [repr(value) in note for note in failure.more_notes] == ([] if is_clear else [True])


class OwnRefusalError(ConnectionRefusedError):
    """A subclass of a connection error, as HTTP libraries define one."""


class LibraryError(OSError):
    """A library's own connection error that is only a subclass of ``OSError``, such as
    ``requests.ConnectionError``.
    """


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def raised_while_handling(error: BaseException, context: BaseException) -> BaseException:
    error.__context__ = context
    return error


class GroupError(Exception):
    """Replacement for ``ExceptionGroup``, because Python 3.10 lacks exception groups."""

    def __init__(self, *exceptions: BaseException) -> None:
        self.exceptions = exceptions


def with_itself_as_cause() -> BaseException:
    error = RuntimeError("x")
    return raised_from(error, error)


REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
TRANSIENT = [
    *(REFUSED, OwnRefusalError("x"), BrokenPipeError(), TimeoutError(), futures.TimeoutError()),
    *(socket.gaierror(-3, "x"), ssl.SSLEOFError(8, "x"), http.client.RemoteDisconnected("x")),
    *(
        OSError(getattr(errno, name), "x")
        for name in ("EHOSTUNREACH", "ENETUNREACH", "ETIMEDOUT", "ECONNRESET")
    ),
    urllib.error.URLError(socket.gaierror(-2, "x")),
    type("DistBackendError", (RuntimeError,), {"__module__": "torch.distributed"})("x"),
    raised_from(RuntimeError("no data"), REFUSED),
    raised_from(KeyError("x"), raised_from(RuntimeError("y"), OwnRefusalError("z"))),
    raised_while_handling(LibraryError("x"), raised_from(ValueError("y"), REFUSED)),
    GroupError(REFUSED, GroupError(TimeoutError())),
]
PERSISTENT = [
    *(ValueError("Connection refused"), OSError(errno.ENOENT, "x"), OSError("x"), OSError([], "x")),
    *(FileNotFoundError(), PermissionError(), ssl.SSLCertVerificationError(1, "x")),
    *(urllib.error.URLError("x"), urllib.error.HTTPError("x", 404, "x", None, None)),
    raised_from(RuntimeError("x"), ValueError("y")),
    # The handler of a connection error has a bug of its own.
    raised_while_handling(KeyError("x"), REFUSED),
    *(GroupError(REFUSED, ValueError("x")), GroupError(), with_itself_as_cause()),
]


@pytest.mark.parametrize("is_transient", [True, False])
def test_the_error_file_says_whether_an_exception_reports_a_lost_connection(tmp_path, is_transient):
    for error in TRANSIENT if is_transient else PERSISTENT:
        assert failure_facts(error)["is_transient"] is is_transient, repr(error)
        failure = ProcessFailure(0, 1, 1, write(tmp_path, error_document(error, "hook")))
        assert failure.is_transient is is_transient
