"""Output of the agent never waits for an unread console."""

import os
import re
import threading

import pytest
from helpers.procs import HANG
from hypothesis import example, given
from hypothesis import strategies as st

from elasticrs._engine.job.phrases import local_time, prefix
from elasticrs._engine.process.console import Console


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        try:
            os.close(fd)
        except OSError:
            assert fd == reader, "only the reader is closed by a test"


def fill(writer):
    """Fill the pipe. Open it again for that, because O_NONBLOCK would apply to all descriptors of the same
    open file description.
    """
    other = os.open(f"/proc/self/fd/{writer}", os.O_WRONLY | os.O_NONBLOCK)
    written = 0
    try:
        while True:
            written += os.write(other, b"x" * 4096)
    except BlockingIOError:
        return written
    finally:
        os.close(other)


def test_a_message_is_one_line_with_the_elasticrs_prefix(pipe):
    reader, writer = pipe
    Console(writer).say("two\nlines")
    assert os.read(reader, 100) == b"elasticrs: two lines\n"


def test_lines_are_queued_while_the_console_is_blocked(pipe):
    reader, writer = pipe
    written = fill(writer)
    console = Console(writer)
    console.say("first")
    console.say("second")
    assert os.get_blocking(writer), "the workers share the descriptor"
    assert not console.flush(0.0)
    assert console.waiting == 2
    assert not console.write("a report\n", 0.05)
    while written:
        written -= len(os.read(reader, written))
    assert console.flush(HANG)
    assert console.waiting == 0
    assert os.read(reader, 100) == b"elasticrs: first\nelasticrs: second\na report\n"


def test_a_line_does_not_wait_for_a_pipe_that_another_writer_fills(pipe, monkeypatch):
    """The pipe has room just before the line is written, and is full when the line is written."""
    reader, writer = pipe
    filled = []
    is_filled, is_drained = threading.Event(), threading.Event()

    def drain():
        left = filled[0]
        is_drained.set()
        while left:
            left -= len(os.read(reader, left))

    # Drain the pipe after a while, so that the test fails instead of hanging if the line is written on this
    # thread.
    late = threading.Timer(HANG / 4, drain)

    def after_filling(write):
        def fill_and_write(fd, *args):
            if fd == writer and not filled:
                filled.append(fill(writer))
                late.start()
                is_filled.set()
            return write(fd, *args)

        return fill_and_write

    for name in ("write", "pwritev"):
        monkeypatch.setattr(os, name, after_filling(getattr(os, name)))
    console = Console(writer)
    console.say("late")
    assert not is_drained.is_set()
    assert console.waiting == 1
    assert is_filled.wait(HANG)
    late.cancel()
    late.join()
    drain()
    assert console.flush(HANG)
    assert os.read(reader, 100) == b"elasticrs: late\n"


def test_lines_of_several_threads_are_all_written(pipe):
    reader, writer = pipe
    console = Console(writer)
    threads = [threading.Thread(target=lambda: [console.say("x") for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    left = 200 * len(b"elasticrs: x\n")
    while left:
        left -= len(os.read(reader, left))
    for thread in threads:
        thread.join()
    assert console.flush(HANG)


def test_a_console_that_another_process_made_non_blocking_gets_all_lines(pipe):
    reader, writer = pipe
    written = fill(writer)
    os.set_blocking(writer, False)
    console = Console(writer)
    console.say("late")
    while written:
        written -= len(os.read(reader, written))
    assert console.flush(HANG)
    assert os.read(reader, 100) == b"elasticrs: late\n"


def test_a_closed_console_causes_no_error(pipe):
    reader, writer = pipe
    console = Console(writer)
    os.close(reader)
    console.say("nobody listens")
    console.say("still nobody")


def test_a_long_line_is_cut_to_the_atomic_write_size_of_a_pipe(pipe):
    reader, writer = pipe
    Console(writer).say("x" * 10_000)
    line = os.read(reader, 65536)
    assert len(line) == 4096
    assert line.endswith(b"x\n")


def test_control_characters_in_messages_are_escaped(pipe):
    reader, writer = pipe
    console = Console(writer)
    console.say("node \x1b]0;title\x07\x9b2J\u202e was lost\r")
    assert os.read(reader, 200) == b"elasticrs: node \\x1b]0;title\\x07\\x9b2J\\u202e was lost\n"
    console.write("a\tb\n\x1b[31mred\udcff\n", 1.0)
    assert os.read(reader, 200) == b"a\tb\n\\x1b[31mred\\xff\n"


@given(
    st.integers(0, 2**62),
    st.from_regex(r"[a-z0-9.-]{1,20}:[0-9]{1,7}", fullmatch=True) | st.just(""),
    st.none() | st.integers(0, 10**5),
)
@example(1_795_470_462_999_999_999, "node1:4711", 0)
def test_a_line_prefix_contains_the_known_time_node_and_group(time_ns, node, group_rank):
    group = "" if group_rank is None else f" group {group_rank}"
    found = re.fullmatch(r"elasticrs\[(\S+?)( .*)?\]: ", prefix(time_ns, node, group_rank))
    assert found[1] == local_time(time_ns, "T", has_milliseconds=True)
    assert (found[2] or "") == (f" {node}" if node else "") + group
    without = prefix(None, node, group_rank)
    assert without == (f"elasticrs[{(node + group).strip()}]: " if node or group else "elasticrs: ")


@pytest.mark.parametrize(
    ("log_prefix", "variable", "on_pipe", "on_terminal"),
    [
        (None, None, True, False),
        ("auto", "none", True, False),
        ("time", "none", True, True),
        ("none", "time", False, False),
        (None, "time", True, True),
        (None, "none", False, False),
        (None, "nonsense", True, False),
    ],
)
def test_lines_show_the_time_as_configured(pipe, monkeypatch, log_prefix, variable, on_pipe, on_terminal):
    monkeypatch.delenv("PET_LOG_PREFIX", raising=False)
    if variable is not None:
        monkeypatch.setenv("PET_LOG_PREFIX", variable)
    ours, theirs = os.openpty()
    try:
        for reader, writer, expected in ((*pipe, on_pipe), (ours, theirs, on_terminal)):
            Console(writer, log_prefix).say("hello")
            pattern = r"elasticrs\[[-\d]+T[:.\d]+Z\]: hello\s+" if expected else r"elasticrs: hello\s+"
            # A terminal may deliver a line in several reads.
            line = b""
            while not line.endswith(b"\n"):
                line += os.read(reader, 200)
            assert re.fullmatch(pattern, line.decode())
    finally:
        os.close(ours)
        os.close(theirs)


@given(st.text(st.characters(), max_size=5000))
@example("caf\udce9 " * 2000)
@example("€" * 5000)
def test_a_line_is_always_utf_8(text):
    """The line is valid UTF-8 even if it contains a file name that is not UTF-8, and if it is shortened."""
    reader, writer = os.pipe()
    console = Console(writer)
    console.say(text)
    assert console.flush(HANG)
    line = os.read(reader, 65536)
    os.close(reader)
    os.close(writer)
    assert line.decode("utf-8").startswith("elasticrs")
    assert len(line) <= 4096
    assert line.endswith(b"\n")


def test_long_lines_are_folded_on_a_terminal_only(pipe):
    ours, theirs = os.openpty()
    try:
        for reader, writer, expected in ((*pipe, 1), (ours, theirs, 4)):
            Console(writer, "none").say("; ".join(["some words about a failure"] * 10))
            line = b""
            while b"\n" not in line or line.count(b"some words") < 10:
                line += os.read(reader, 4096)
            assert len(line.split(b"\n")) == expected + 1
        os.close(ours)
        ours = os.dup(theirs)
        Console(theirs, "none").say("a line for a terminal that is gone")
    finally:
        os.close(ours)
        os.close(theirs)
