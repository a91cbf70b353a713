"""The notice with which a failed worker reports the exception to its agent."""

import builtins
import socket
import sys
import traceback

import pytest

from elasticrs._worker.error_file import give_notice
from elasticrs.report.traceback_summary import headline

READ_BY_AGENT = 4096  # bytes


def test_a_notice_with_non_ascii_text_fits_the_read_limit_of_the_agent(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"def f(n):\n    f(n - 1) if n else 1 / 0  # {'ü' * 900}\n", encoding="utf-8")
    names = {}
    exec(compile(script.read_text("utf-8"), str(script), "exec"), names)
    try:
        names["f"](3)
    except ZeroDivisionError as cause:
        error = ValueError("läuft über: " + "€" * 3000)
        error.__cause__ = cause
    assert len("".join(traceback.format_exception(error)).encode()) > READ_BY_AGENT
    text = received(error)
    assert "\nValueError: läuft über: €" in text


def received(error):
    """Return the text of the exception that the agent receives."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind("")
        agent.setblocking(False)
        give_notice(agent.getsockname()[1:].decode(), error)
        notice = agent.recv(1 << 16)
    assert len(notice) <= READ_BY_AGENT
    head, text = notice.decode().split("\n", 1)
    recorded, *_ = head.split()
    assert int(recorded) > 0
    return text


def raised(error):
    """Return an exception with a traceback."""
    try:
        raise error
    except Exception as caught:
        return caught


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups need Python 3.11")
def test_a_notice_of_a_group_is_of_a_member():
    group = builtins.ExceptionGroup
    error = raised(group("outer", [group("inner", [KeyError("label")]), ValueError("x")]))
    assert headline(received(error)).startswith("KeyError: 'label' (test_error_notice.py:")


def test_a_notice_contains_the_end_of_the_traceback_of_another_process():
    frames = "".join(f'  File "worker.py", line {number}, in f\n    call(f)\n' for number in range(200))
    original = f"Original Traceback (most recent call last):\n{frames}KeyError: 'label'\n"
    error = raised(KeyError(Text(f"Caught KeyError in DataLoader worker process 0.\n{original}")))
    assert headline(received(error)) == "KeyError: 'label' (worker.py:199)"


class Text(str):
    """A string that ``repr`` does not quote. Torch uses such a type for the message of a ``KeyError``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
