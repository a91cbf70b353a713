"""``expires``: the calls that it makes to its client, and their times."""

import os
import threading
import time

import pytest
from helpers.procs import HANG

from elasticrs import timer
from elasticrs.timer import api


class Recorder(timer.TimerClient):
    """Records calls as the scope and the seconds until it expires, or ``None`` for a release."""

    def __init__(self):
        self.calls = []

    def acquire(self, scope_id, expiration_time):
        self.calls.append((scope_id, round(expiration_time - time.time())))

    def release(self, scope_id):
        self.calls.append((scope_id, None))


@pytest.fixture
def client(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(api, "_timer_client", None)
    timer.configure(recorder)
    return recorder


def test_expires_without_a_client_names_configure_in_the_error(monkeypatch):
    monkeypatch.setattr(api, "_timer_client", None)
    with pytest.raises(RuntimeError, match="configure"), timer.expires(after=1):
        pass


def test_the_default_scope_is_the_line_of_the_caller(client):
    with timer.expires(after=5):
        assert client.calls[0][0].startswith(f"{__file__}#")
    line = int(client.calls[0][0].rpartition("#")[2])
    with open(__file__) as source:
        assert "timer.expires(after=5)" in source.readlines()[line - 1]


def test_expires_blocks_can_be_nested(client):
    with timer.expires(after=50, scope="outer"), timer.expires(after=10, scope="inner"):
        pass
    assert client.calls == [("outer", 50), ("inner", 10), ("inner", None), ("outer", None)]


def test_a_nested_block_of_the_same_scope_keeps_the_earliest_deadline(client):
    with timer.expires(after=10, scope="a"):
        with timer.expires(after=50, scope="a"):
            pass
        assert client.calls == [("a", 10), ("a", 10), ("a", 10)]
    assert client.calls[3:] == [("a", None)]


def test_methods_of_a_subclass_of_the_file_client_are_called(monkeypatch):
    class Guarded(timer.FileTimerClient):
        def acquire(self, scope_id, expiration_time):
            told.append(scope_id)
            super().acquire(scope_id, expiration_time)

    told, sent = [], []
    monkeypatch.setattr(timer.FileTimerClient, "_send", lambda _, *request: sent.append(request[0]))
    with timer.expires(after=5, scope="a", client=Guarded("/nowhere")):
        pass
    assert told == ["a"]
    assert sent == ["a", "a"]


def test_a_replaced_acquire_of_the_file_client_is_called(monkeypatch):
    told = []
    monkeypatch.setattr(timer.FileTimerClient, "acquire", lambda _, scope_id, __: told.append(scope_id))
    monkeypatch.setattr(timer.FileTimerClient, "release", lambda *_: None)
    with timer.expires(after=5, scope="a", client=timer.FileTimerClient("/nowhere")):
        pass
    assert told == ["a"]


def test_a_decorated_function_may_call_itself(client):
    @timer.expires(after=20, scope="f")
    def countdown(n):
        """Down."""
        return countdown(n - 1) if n else "done"

    assert countdown(2) == "done"
    assert countdown.__doc__ == "Down."
    assert [call for call in client.calls if call[1] is None] == [("f", None)]
    assert api._live == {}


def test_an_exception_propagates_and_the_timer_is_released(client):
    with pytest.raises(KeyError), timer.expires(after=5, scope="a"):
        raise KeyError
    assert client.calls[-1] == ("a", None)


def test_a_failing_client_leaves_no_live_timer(client, monkeypatch):
    def refuse(scope_id, expiration_time):
        raise BrokenPipeError

    monkeypatch.setattr(client, "acquire", refuse)
    with pytest.raises(BrokenPipeError), timer.expires(after=5, scope="a"):
        pass
    assert api._live == {}


def test_threads_in_the_same_scope_release_it_once(client):
    inside, leave = threading.Barrier(3), threading.Event()

    def work():
        with timer.expires(after=30, scope="shared"):
            inside.wait(20)
            leave.wait(20)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait(20)
    assert ("shared", None) not in client.calls
    leave.set()
    for thread in threads:
        thread.join()
    assert client.calls.count(("shared", None)) == 1
    assert client.calls[-1] == ("shared", None)


def test_one_block_in_several_threads_keeps_the_deadline_of_the_remaining_thread(client):
    block = timer.expires(after=30, scope="shared")
    with block:
        entered, leave = threading.Event(), threading.Event()

        def work():
            block._after = 60
            with block:
                entered.set()
                leave.wait(HANG)

        thread = threading.Thread(target=work)
        thread.start()
        assert entered.wait(HANG)
    assert client.calls == [("shared", 30), ("shared", 30), ("shared", 60)]
    leave.set()
    thread.join()
    assert client.calls[-1] == ("shared", None)


def test_a_forked_child_has_its_own_timers(client):
    reader, writer = os.pipe()
    with timer.expires(after=10, scope="a"):
        pid = os.fork()
        if pid == 0:
            with timer.expires(after=50, scope="a"):
                os.write(writer, repr(client.calls[-1]).encode())
            os._exit(0)
    os.close(writer)
    assert os.read(reader, 100) == b"('a', 50)"
    os.close(reader)
    assert os.waitpid(pid, 0)[1] == 0
