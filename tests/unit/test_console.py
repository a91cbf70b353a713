"""Lines of the agent never wait for a console that nobody reads."""

import os

import pytest

from elasticrs.console import Console


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
    """Fill the pipe to the brim, through a description of its own: flags are shared by descriptors."""
    other = os.open(f"/proc/self/fd/{writer}", os.O_WRONLY | os.O_NONBLOCK)
    written = 0
    try:
        while True:
            written += os.write(other, b"x" * 4096)
    except BlockingIOError:
        return written
    finally:
        os.close(other)


def test_a_line_has_our_name_and_is_one_line(pipe):
    reader, writer = pipe
    Console(writer).say("two\nlines")
    assert os.read(reader, 100) == b"elasticrs: two lines\n"


def test_lines_wait_while_the_console_is_stuck(pipe):
    reader, writer = pipe
    written = fill(writer)
    console = Console(writer)
    console.say("first")
    console.say("second")
    assert os.get_blocking(writer), "the workers share the descriptor"
    while written:
        written -= len(os.read(reader, written))
    console.flush()
    assert os.read(reader, 100) == b"elasticrs: first\nelasticrs: second\n"


def test_a_console_that_is_gone_is_no_error(pipe):
    reader, writer = pipe
    console = Console(writer)
    os.close(reader)
    console.say("nobody listens")
    console.say("still nobody")


def test_a_long_line_is_cut_to_what_a_pipe_takes_in_one_piece(pipe):
    reader, writer = pipe
    Console(writer).say("x" * 10_000)
    line = os.read(reader, 65536)
    assert len(line) == 4096
    assert line.endswith(b"x\n")


def test_what_others_wrote_cannot_steer_the_terminal(pipe):
    reader, writer = pipe
    console = Console(writer)
    console.say("node \x1b]0;title\x07\x9b2J\u202e was lost\r")
    assert os.read(reader, 200) == b"elasticrs: node \\x1b]0;title\\x07\\x9b2J\\u202e was lost\n"
    console.write("a\tb\n\x1b[31mred\udcff\n", 1.0)
    assert os.read(reader, 200) == b"a\tb\n\\x1b[31mred\xff\n"
