"""The notice with which a failed worker reports the exception to its agent."""

import builtins
import socket
import sys
import traceback

import pytest
from helpers.procs import interpreters
from worker_hook.test_hook import worker

from elasticrs._engine.inside.error_file import give_notice
from elasticrs._engine.job.phrases import headline

__all__ = ["worker"]

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


def raised_by(fail):
    """Return the exception that a function raises."""
    try:
        fail()
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


def chained():
    try:
        raise KeyError("first")
    except KeyError:
        raise ValueError("second") from OSError(2, "No such file", "data.bin")


def chained_by_accident():
    try:
        raise KeyError("first")
    except KeyError:
        len(3)


def broken():
    compile("def f(:\n", "model.py", "exec")


def nested(depth=300):
    return nested(depth - 1) if depth else {}["x"]


class OddError(Exception):
    def __str__(self):
        raise ValueError("no text")


def odd():
    raise OddError


def in_a_pool():
    error = KeyError("label")
    frames = '  File "worker.py", line 3, in f\n    return {}["label"]\n'
    error.__cause__ = RemoteTraceback(
        f'\n"""\nTraceback (most recent call last):\n{frames}KeyError: \'label\'\n"""'
    )
    raise error


class RemoteTraceback(Exception):  # noqa: N818 -- the name is that of multiprocessing
    def __str__(self):
        return str(self.args[0])


RemoteTraceback.__module__ = "multiprocessing.pool"


@pytest.mark.parametrize("fail", [chained, chained_by_accident, broken, nested, odd, in_a_pool])
def test_a_notice_names_the_exception_and_the_place_that_the_traceback_names(fail):
    error = raised_by(fail)
    assert headline(received(error)) == headline("".join(traceback.format_exception(error)))


@pytest.mark.parametrize("python", interpreters())
def test_a_notice_is_sent_before_modules_are_imported_and_source_files_are_read(worker, python):
    source = """
    import _socket, os, sys
    seen, loaded = [], set(sys.modules)
    def watch(event, arguments):
        if event == "open":
            seen.append(str(arguments[0]))
        if event == "socket.sendto":
            own = [path for path in seen if path.endswith(".py") and "/_engine/inside/" not in path]
            os.write(1, repr((own, sorted(set(sys.modules) - loaded - {*sys.builtin_module_names}))).encode())
    sys.addaudithook(watch)
    raise ValueError("no such batch")
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind("")
        name = agent.getsockname()[1:].decode()
        done = worker.run(source, python=python, ELASTICRS_NOTICES=name)
        assert agent.recv(1 << 16).endswith(b"ValueError: no such batch\n")
    assert done.stdout == "([], [])", done.stderr
    assert "traceback" in worker.error()["message"]["extraInfo"]["py_callstack"].lower()
