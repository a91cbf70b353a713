"""The client of FIFO timers: the records that it writes, and a FIFO that it cannot write to."""

import fcntl
import json
import logging
import math
import os
import sys
import textwrap
import threading
import time
from functools import partial

import pytest
from helpers.procs import HANG, run_program, wait_readable

from elasticrs.timer import FileTimerClient, FileTimerRequest, expires, file_based_local_timer


class Fifo:
    def __init__(self, path):
        self.path = str(path)
        os.mkfifo(self.path)
        self.fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)

    def fill(self):
        """Write until not a single byte more fits into the FIFO."""
        for size in (4096, 1):
            try:
                while True:
                    os.write(self.fd, b"\n" * size)
            except BlockingIOError:
                continue

    def records(self):
        try:
            text = os.read(self.fd, 1 << 20)
        except BlockingIOError:
            return []
        return [json.loads(line) for line in text.split(b"\n") if line]

    def close(self):
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


@pytest.fixture
def fifo(tmp_path):
    fifo = Fifo(tmp_path / "fifo")
    yield fifo
    fifo.close()


@pytest.fixture
def client(fifo, monkeypatch):
    """A client in a worker of an elasticrs agent."""
    monkeypatch.setenv("ELASTICRS_TIMER_FILE", fifo.path)
    client = FileTimerClient(fifo.path)
    yield client
    client.close()


def test_records_under_an_elasticrs_agent_extend_the_fields_of_torch(fifo, client):
    with expires(after=60, scope='the "é" step', client=client):
        (acquire,) = fifo.records()
    (release,) = fifo.records()
    left = (acquire.pop("deadline_ns") - time.monotonic_ns()) / 1e9
    assert 50 < left <= 60
    assert abs(acquire.pop("expiration_time") - time.time() - left) < 5
    with open("/proc/self/stat") as stat:
        started = int(stat.read().rpartition(")")[2].split()[19])
    assert acquire.pop("at").startswith("test_file_client.py#")
    common = {"version": 1, "pid": os.getpid(), "scope_id": 'the "é" step', "start_time": started}
    assert acquire == {**common, "signal": 9}
    assert release == {**common, "signal": 0, "expiration_time": -1}


def test_without_an_agent_the_client_writes_the_same_records_as_torch(fifo):
    client = FileTimerClient(fifo.path, signal=0)
    client.acquire("a", 1700000000.25)
    client._send_request(FileTimerRequest(7, "b", -1))
    expected = {
        "version": 1,
        "pid": os.getpid(),
        "scope_id": "a",
        "expiration_time": 1700000000.25,
        "signal": 0,
    }
    assert fifo.records() == [expected, json.loads(FileTimerRequest(7, "b", -1).to_json())]
    assert client._fd == -1


def test_an_infinite_time_is_accepted_but_nan_and_long_scopes_are_refused(fifo, client):
    client.acquire("never", math.inf)
    assert fifo.records()[0]["expiration_time"] > time.time() + 1e9
    with pytest.raises(ValueError, match="expiration"):
        client.acquire("when", math.nan)
    with pytest.raises(RuntimeError, match="4096"):
        client.acquire("x" * 5000, 1.0)
    assert fifo.records() == []


def test_a_full_pipe_blocks_no_caller_and_loses_no_release(fifo, client, caplog):
    client.acquire("step", time.time() + 60)
    fifo.fill()
    with caplog.at_level(logging.WARNING):
        client.acquire("other", time.time() + 60)
        client.acquire("other", time.time() + 60)
    assert client.dropped == 2
    assert len(caplog.records) == 1
    assert "full" in caplog.text
    client.release("step")
    client.acquire("step", time.time() + 60)
    # This request was dropped, because it would have to wait behind a queued release.
    assert client.dropped == 3
    while not (seen := [r for r in fifo.records() if r["expiration_time"] < 0]):
        assert wait_readable(fifo.fd, HANG)
    assert [r["scope_id"] for r in seen] == ["step"]
    client.acquire("step", time.time() + 60)
    assert [r["scope_id"] for r in fifo.records()] == ["step"]
    for thread in threading.enumerate():
        if thread.name == "FileTimerClient":
            thread.join(HANG)


@pytest.mark.parametrize("room", [4096, 1 << 20])
def test_records_of_several_threads_are_whole_and_in_order(fifo, client, room, request):
    threads, blocks = 8, 500
    # Switch threads as often as possible, even in the middle of a request.
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    fcntl.fcntl(fifo.fd, fcntl.F_SETPIPE_SZ, room)
    begin = threading.Barrier(threads)

    def works(scope):
        begin.wait(HANG)
        for _ in range(blocks):
            with expires(after=60, scope=scope, client=client):
                pass

    started = [threading.Thread(target=works, args=(f"thread {number}",)) for number in range(threads)]
    for thread in started:
        thread.start()
    live, acquired, released, rest = set(), 0, 0, b""
    # The client queues only releases, and each of them belongs to one block. So all blocks are done when as
    # many releases have arrived.
    while released < threads * blocks:
        assert wait_readable(fifo.fd, HANG)
        *lines, rest = (rest + os.read(fifo.fd, 1024)).split(b"\n")
        for record in map(json.loads, lines):
            scope = record["scope_id"]
            if record["expiration_time"] < 0:
                released += 1
                live.discard(scope)
            else:
                acquired += 1
                assert scope not in live, "a release has been overtaken"
                live.add(scope)
    for thread in started:
        thread.join(HANG)
    assert (live, rest) == (set(), b"")
    assert acquired + client.dropped == threads * blocks
    for thread in threading.enumerate():
        if thread.name == "FileTimerClient":
            thread.join(HANG)
    assert fifo.records() == []


def test_timer_calls_do_not_fail_if_the_agent_is_dead(fifo, client):
    client.acquire("a", time.time() + 60)
    fifo.close()
    client.release("a")
    os.unlink(fifo.path)
    with expires(after=1, client=client):
        pass
    assert client.dropped == 3


def test_the_first_request_without_a_server_fails_as_in_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(file_based_local_timer, "_PAUSE", 0)
    with pytest.raises(BrokenPipeError, match="timer server"):
        FileTimerClient(str(tmp_path / "nothing")).acquire("a", 1.0)


def test_a_forked_child_writes_records_with_its_own_pid(fifo, client):
    client.acquire("a", time.time() + 60)
    with client._lock:  # as if another thread held the lock
        pid = os.fork()
        if pid == 0:
            client.acquire("b", time.time() + 60)
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert [(r["pid"], r["scope_id"]) for r in fifo.records()] == [(os.getpid(), "a"), (pid, "b")]


def test_a_descriptor_reused_for_another_file_is_not_written_to(fifo, client, tmp_path):
    client.acquire("a", time.time() + 60)
    with open(tmp_path / "precious", "wb") as other:
        os.dup2(other.fileno(), client._fd)
        number = client._fd
        client.acquire("b", time.time() + 60)
        assert client._fd != number
        os.close(number)
    assert (tmp_path / "precious").read_bytes() == b""
    assert len(fifo.records()) == 2


def run(source, *args):
    program = [sys.executable, "-c", textwrap.dedent(source), *args]
    return run_program(program)


def test_the_timer_server_of_torch_accepts_records_of_this_client(tmp_path, torch_programs):
    program = """
        import sys, time
        from torch.distributed.elastic.timer import FileTimerServer
        from elasticrs.timer import FileTimerClient
        server = FileTimerServer(sys.argv[1], "run", max_interval=0.05)
        server.start()
        client = FileTimerClient(sys.argv[1], signal=15)
        for scope in "ab":
            client.acquire(scope, time.time() + 1000)
        client.release("a")
        server.run_once()
        print(server._request_count, [(t.scope_id, t.signal) for t in server._timers.values()])
    """
    output = torch_programs.checked(textwrap.dedent(program), str(tmp_path / "fifo"))
    assert output == "3 [('b', 15)]\n"


def test_importing_elasticrs_timer_loads_no_heavy_modules():
    done = run("import sys; import elasticrs.timer; print(*sys.modules)")
    loaded = set(done.stdout.split())
    heavy = {
        "logging",
        "re",
        "json",
        "threading",
        "multiprocessing",
        "typing",
        "enum",
        "elasticrs._core",
        "torch",
    }
    without = run("import sys; print(*sys.modules)").stdout.split()
    assert not (loaded - set(without)) & heavy
