"""Access to files that may hang. Each ``FileAccess`` waits for at most one time limit, and keeps at most one
thread.
"""

import os
import threading

import pytest
from helpers.procs import HANG

from elasticrs._engine.process import background_call
from elasticrs._engine.process.background_call import BackgroundCall, FileAccess


@pytest.fixture
def fifo(tmp_path):
    """Return the path of a FIFO. Reading it hangs until ``release`` is called."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def test_the_result_and_the_exception_of_a_function_are_passed_on():
    files = FileAccess()
    assert files.run(threading.get_ident, 0) not in {0, threading.get_ident()}
    with pytest.raises(FileNotFoundError):
        files.run(lambda: os.stat("/does/not/exist"), None)
    assert files.run(lambda: 7, 0) == 7


def test_a_file_that_hangs_costs_one_limit_and_one_thread(fifo, monkeypatch):
    monkeypatch.setattr(background_call, "FILE_LIMIT", 0.05)
    told = []
    files = FileAccess(lambda: told.append(threading.active_count()))
    has_read, ran = threading.Event(), []

    def read():
        fifo.read_bytes()
        has_read.set()
        return "read"

    assert files.run(read, "default") == "default"
    monkeypatch.setattr(files, "_limit", HANG)
    assert [files.run(lambda: ran.append(1), "default") for _ in range(3)] == ["default"] * 3
    files.begin(lambda: ran.append(1))
    assert (len(told), ran) == (1, [])
    with fifo.open("wb"):
        pass
    assert has_read.wait(HANG)
    monkeypatch.setattr(files, "_is_stuck", False)
    assert files.run(lambda: 7, 0) == 7


def test_a_function_that_was_begun_is_waited_for():
    files, may_end, order = FileAccess(), threading.Event(), []
    files.begin(lambda: (may_end.wait(HANG), order.append("first")))
    threading.Timer(0.05, may_end.set).start()
    files.run(lambda: order.append("second"), None)
    assert order == ["first", "second"]


def test_an_interrupted_call_ends_at_its_next_python_instruction():
    may_end, has_ended = threading.Event(), []

    def ask():
        try:
            while not may_end.wait(0.01):
                pass
        finally:
            has_ended.append(may_end.is_set())

    call = BackgroundCall(ask)
    call.interrupt()
    assert call.wait(HANG)
    may_end.set()
    # A second one does nothing, because the call has returned.
    call.interrupt()
    with pytest.raises(SystemExit):
        call.take()
    call.close()
    assert has_ended in ([False], [])
