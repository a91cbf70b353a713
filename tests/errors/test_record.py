"""Tests of `@record` and the error handler."""

import json
import logging
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from helpers import procs
from helpers.launcher import clean_environment
from helpers.procs import run_program

from elasticrs._engine import inside
from elasticrs._engine.inside.error_file import write_whole
from elasticrs.multiprocessing.errors import (
    ChildFailedError,
    ErrorHandler,
    ProcessFailure,
    error_handler,
    get_error_handler,
    record,
)


@pytest.fixture(autouse=True)
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    # The tests would otherwise redirect pytest's fault handler.
    monkeypatch.setattr("faulthandler.enable", mock.Mock())
    return path


class Calls(ErrorHandler):
    """Records the calls to the handler."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def set_entrypoint_fn_name(self, fn_name: str | None) -> None:
        self.calls.append(f"name {fn_name}")

    def initialize(self) -> None:
        self.calls.append("initialize")

    def record_exception(self, e: BaseException) -> None:
        self.calls.append(f"exception {e}")

    def record_success(self) -> None:
        self.calls.append("success")


def test_record_returns_the_result_of_the_function(error_file):
    calls = Calls()

    def double(number: int, *, by: int = 2) -> int:
        """Doubles."""
        return number * by

    decorated = record(double, calls)
    assert decorated(4, by=3) == 12
    assert decorated.__name__ == "double"
    assert calls.calls == [f"name {double.__qualname__}", "initialize", "success"]
    assert not error_file.exists()


def test_an_exception_is_recorded_and_raised(error_file):
    @record
    def fails() -> None:
        raise ValueError("foobar")

    with pytest.raises(ValueError, match="foobar"):
        fails()
    data = json.loads(error_file.read_text())
    assert data["message"]["message"] == "ValueError: foobar"
    assert data["message"]["extraInfo"]["py_callstack"].startswith("Traceback")
    assert int(data["message"]["extraInfo"]["timestamp"]) > 0
    assert data["elasticrs"]["written_by"] == "record"


def test_an_exception_in_record_success_is_raised_but_not_recorded():
    class Failing(Calls):
        def record_success(self) -> None:
            raise RuntimeError("telemetry")

    handler = Failing()
    with pytest.raises(RuntimeError, match="telemetry"):
        record(lambda: None, handler)()
    assert not any(call.startswith("exception") for call in handler.calls)


def test_no_error_file_is_written_without_the_environment_variable(monkeypatch, error_file):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    with pytest.raises(ZeroDivisionError):
        record(lambda: 1 / 0)()
    assert not error_file.exists()


def raise_child_failure(error_file: Path) -> None:
    raise ChildFailedError("train.py", {0: ProcessFailure(0, 997, 3, str(error_file))})


@pytest.mark.parametrize("content", [None, "", '{"message": {"mess', "[1]", "[" * 100_000])
def test_a_missing_or_malformed_error_file_does_not_hide_the_failure(tmp_path, error_file, content):
    of_worker = tmp_path / "worker.json"
    if content is not None:
        of_worker.write_text(content)
    with pytest.raises(ChildFailedError):
        record(raise_child_failure)(of_worker)
    assert not error_file.exists()


def test_a_flat_error_file_is_forwarded_without_an_error_code(tmp_path, error_file, caplog):
    of_worker = tmp_path / "worker.json"
    of_worker.write_text('{"message": "text", "timestamp": 10}')
    ErrorHandler().dump_error_file(str(of_worker), 3)
    assert json.loads(error_file.read_text()) == {"message": "text", "timestamp": 10}
    assert "no place for error code 3" in caplog.text


def test_the_error_file_of_a_worker_is_logged_if_it_cannot_be_forwarded(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    of_worker = tmp_path / "worker.json"
    of_worker.write_text('{"message": "text"}')
    ErrorHandler().dump_error_file(str(of_worker))
    assert '"message": "text"' in caplog.text


def test_record_success_is_logged_only_with_an_entrypoint_name():
    assert isinstance(error_handler.logger, logging.Logger)
    assert isinstance(get_error_handler(), ErrorHandler)
    with mock.patch.object(error_handler.logger, "debug") as debug:
        ErrorHandler().record_success()
        debug.assert_not_called()
        handler = ErrorHandler()
        handler.set_entrypoint_fn_name("main")
        handler.record_success()
        debug.assert_called_once()


def test_a_fault_handler_that_cannot_be_enabled_causes_a_warning(monkeypatch):
    monkeypatch.setattr("faulthandler.enable", mock.Mock(side_effect=RuntimeError("no stderr")))
    with pytest.warns(UserWarning, match="no stderr"):
        ErrorHandler().initialize()


# --- the file ---


def test_an_error_file_is_replaced_atomically(tmp_path):
    path = tmp_path / "error.json"
    path.write_text("old")
    held = path.open()
    write_whole(str(path), "new")
    with held:
        assert held.read() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["error.json"]


def test_an_error_file_that_cannot_be_replaced_is_written_in_place(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with mock.patch("os.replace", side_effect=OSError("a mount point")):
            write_whole(str(pipe), "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def fail() -> None:
    raise ValueError("no")


@pytest.fixture(params=["device", "pipe", "link"])
def special(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield the path of a file that is not a regular file, in a separate folder."""
    path = tmp_path / "special" / request.param
    path.parent.mkdir()
    reader = None
    if request.param == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
            path.write_text("")
        except OSError as error:
            pytest.skip(f"no device can be made: {error}")
    elif request.param == "pipe":
        os.mkfifo(path)
        # A reader must exist, because writers would otherwise block.
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    else:
        path.symlink_to(tmp_path / "target")
    before = path.lstat()
    yield path
    after = path.lstat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert os.listdir(path.parent) == [request.param]
    if reader is not None:
        os.close(reader)
    if request.param == "link":
        assert '"message"' in (tmp_path / "target").read_text()


def test_a_pipe_or_device_as_error_file_is_written_in_place(special, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(special))
    with pytest.raises(ValueError, match="no"):
        record(fail)()


def test_a_pipe_or_device_as_error_file_is_not_removed(special, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(special))
    of_worker = tmp_path / "worker.json"
    of_worker.write_text('{"message": "text"}')
    with pytest.raises(ChildFailedError):
        record(raise_child_failure)(of_worker)


def test_the_worker_hook_creates_no_file_beside_a_pipe_or_device(special):
    hook = Path(inside.__file__).with_name("hook")
    env = {"PYTHONPATH": str(hook), "TORCHELASTIC_ERROR_FILE": str(special)}
    done = subprocess.run(
        [sys.executable, "-c", "[][1]"], env=env, capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert b"IndexError" in done.stderr
    assert b"elasticrs:" not in done.stderr


def test_importing_the_errors_package_loads_no_heavy_modules():
    heavy = "json logging dataclasses typing traceback socket signal inspect re torch"
    program = (
        "import sys, elasticrs.multiprocessing.errors as e; f = e.record(lambda: 1); f();"
        f"print([m for m in {heavy!r}.split() if m in sys.modules])"
    )
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "TORCHELASTIC_ERROR_FILE": "/nonexistent"}
    done = run_program([sys.executable, "-S", "-c", program], check=True, env=env)
    assert done.stdout == "[]\n"


CRASH = """
import os, signal, sys
from elasticrs.launcher import LaunchConfig, elastic_launch
from elasticrs.multiprocessing.errors import record

def crash():
    os.kill(os.getpid(), signal.SIGABRT)

if __name__ == "__main__" and len(sys.argv) == 1:
    record(crash)()
elif __name__ == "__main__":
    how = {"rdzv_backend": "c10d", "start_method": sys.argv[1], "max_restarts": 0}
    elastic_launch(LaunchConfig(1, 1, 1, run_id="job", **how), crash)()
"""


@pytest.mark.beyond_torchrun
@pytest.mark.parametrize("how", ["record", "fork", "spawn"])
def test_the_report_shows_where_a_recorded_function_crashed(tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(CRASH)
    command = [sys.executable, script, how]
    if how == "record":
        command = [sys.executable, "-m", "elasticrs", "--nproc-per-node=1", script]
    done = run_program(command, env=clean_environment(), cwd=tmp_path)
    procs.reap_adopted()
    assert done.returncode == 1
    report = done.stderr.partition("Root Cause")[2]
    assert re.search(r"Fatal Python error: Aborted.*in crash\n", report, re.S), done.stderr
