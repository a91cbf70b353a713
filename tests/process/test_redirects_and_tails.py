"""Redirecting standard output and tailing files, both without an agent."""

import ctypes
import io
import logging
import os
import subprocess
import sys
import threading

import pytest
from helpers import procs

from elasticrs.multiprocessing.redirects import redirect, redirect_stderr, redirect_stdout
from elasticrs.multiprocessing.tail_log import TailLog, tail_logfile


def test_output_of_python_c_code_and_children_is_redirected_and_restored(tmp_path, capfd):
    path = tmp_path / "out"
    path.write_text("old")
    with redirect_stdout(str(path)):
        print("python")
        sys.stdout.flush()
        ctypes.CDLL(None).printf(b"c\n")
        subprocess.run(["echo", "child"], check=True)
    print("back")
    assert sorted(path.read_text().splitlines()) == ["c", "child", "python"]
    assert capfd.readouterr().out == "back\n"


def test_stdout_and_stderr_are_redirected_separately(tmp_path):
    out, err = tmp_path / "out", tmp_path / "err"
    with redirect_stdout(str(out)), redirect_stderr(str(err)):
        os.write(1, b"1")
        os.write(2, b"2")
    assert (out.read_text(), err.read_text()) == ("1", "2")


def test_a_redirected_stream_is_restored_after_an_error(tmp_path, capfd):
    with pytest.raises(RuntimeError), redirect_stdout(str(tmp_path / "out")):
        raise RuntimeError
    os.write(1, b"back")
    assert capfd.readouterr().out == "back"


def test_redirecting_an_unknown_stream_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="<stdfoo>"), redirect("stdfoo", str(tmp_path / "x")):
        pytest.fail("redirected")


def test_a_tail_shows_whole_lines_of_files_created_later(tmp_path):
    paths = {index: str(tmp_path / str(index)) for index in range(3)}
    screen = io.StringIO()
    tail = TailLog("w", paths, screen, {2: "two "}, interval_sec=0.001).start()
    assert not tail.stopped()
    for index, path in paths.items():
        with open(path, "wb") as file:
            file.write(b"a")
            file.flush()
            file.write(b"b\nlast \xff%d" % index)
    tail.stop()
    assert tail.stopped()
    assert sorted(screen.getvalue().splitlines()) == [
        *("[w0]:ab", "[w0]:last \ufffd0", "[w1]:ab", "[w1]:last \ufffd1", "two ab", "two last \ufffd2")
    ]


def test_a_tail_shows_a_line_before_it_is_stopped(tmp_path):
    reader, writer = os.pipe()
    path = tmp_path / "log"
    path.write_text("first\n")
    with (
        open(reader, encoding="utf-8") as screen,
        open(writer, "w", buffering=1, encoding="utf-8") as console,
    ):
        tail = TailLog("w", {0: str(path)}, console, interval_sec=0.01).start()
        assert procs.wait_readable(reader)
        assert screen.readline() == "[w0]:first\n"
        tail.stop()


def test_a_tail_without_files_or_destination_does_nothing():
    for tail in (TailLog("w", {}, sys.stdout), TailLog("w", {0: "/no/such"}, None)):
        tail.start().stop()
        assert tail.stopped()


def test_a_tail_logs_an_unreadable_file_and_shows_the_others(tmp_path, caplog):
    (tmp_path / "good").write_text("x\n")
    screen = io.StringIO()
    with caplog.at_level(logging.ERROR):
        TailLog("w", {0: str(tmp_path), 1: str(tmp_path / "good")}, screen).start().stop()
    assert screen.getvalue() == "[w1]:x\n"
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_tail_shows_only_lines_that_pass_its_filter(tmp_path):
    (tmp_path / "log").write_text("yes\nno\n")
    screen = io.StringIO()
    finished = threading.Event()
    finished.set()
    tail_logfile(">", str(tmp_path / "log"), screen, finished, 1.0, lambda line: "y" in line)
    tail_logfile("!", str(tmp_path / "log"), screen, finished, 1.0)
    tail_logfile("!", str(tmp_path / "none"), screen, finished, 1.0)
    assert screen.getvalue() == ">yes\n!yes\n!no\n"
