"""Clients and stores that are stopped, slow, stalled or gone."""

import contextlib
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from helpers import procs
from helpers.coordination import (
    ALIVE,
    MAGIC,
    MAJOR,
    READY,
    RUN,
    Client,
    RawClient,
    frame,
    serving,
    store_command,
    text,
)

from elasticrs import _core
from elasticrs._core import Op

MEMBER = """
import sys
from elasticrs import _core
port, run_id = int(sys.argv[1]), sys.argv[2]
client = _core.CoordinationClient("127.0.0.1", port, run_id=run_id, interval=0.1, attempts=15)
client.txn(1, [], [_core.Op.put("member", b"", True)])
client.watch(2, "news")
seen = 0
while seen < 3:
    client.wait(None)
    seen += len(client.take())
print("READY", flush=True)
sys.stdin.readline()
print(*[type(event).__name__ + getattr(event, "kind", "") for event in client.take()], flush=True)
"""


@pytest.fixture
def member() -> Iterator[subprocess.Popen[str]]:
    """Return a function that starts a process with a session of 15 intervals of 0.1 s. On request, the
    process prints its new events.
    """
    started: list[subprocess.Popen[str]] = []

    def start(port: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MEMBER, str(port), RUN]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "READY\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_leased_keys_of_a_killed_process_are_deleted_immediately(member):
    with serving() as store:
        watcher = store.client()
        process = member(store.port)
        watcher.watch("member")
        process.kill()
        assert watcher.changes() == [("member", None)]


def test_a_process_paused_by_sigstop_loses_its_lease_and_reports_the_loss(member):
    with serving() as store:
        watcher = store.client()
        process = member(store.port)
        watcher.watch("member")
        running = time.monotonic()
        process.send_signal(signal.SIGSTOP)
        procs.wait_state(process.pid, "T")
        watcher.put("news", b"not for the dead")
        assert watcher.changes() == [("member", None)]
        # The last keep-alive was sent an interval before the stop, or earlier on a loaded machine.
        assert time.monotonic() - running > 1.5 / 2
        process.send_signal(signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ConnectionLostsilent\n"


@pytest.fixture
def server_process() -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen(store_command(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline().rpartition(":")[2])
        process.send_signal(signal.SIGCONT)
        process.terminate()
        assert process.wait(procs.HANG) == 0


def test_a_store_that_was_paused_does_not_end_leases_too_early(server_process):
    process, port = server_process
    with contextlib.ExitStack() as clients:

        def opened(client):
            return clients.enter_context(contextlib.closing(client))

        patient = opened(Client(port, interval=0.1, attempts=100)).connected()
        patient.watch("")
        # This client sends nothing except the keep-alive below, and does not close its session itself.
        silent = opened(RawClient(port)).connected(interval_ms=400, attempts=5)
        fenced = opened(Client(port, interval=0.1, attempts=10)).connected()
        fenced.txn(then=[Op.put("fenced", b"", True)])
        assert patient.changes() == [("fenced", b"")]
        clock = opened(Client(port, interval=0.25, attempts=12)).connected()
        heard = time.monotonic()
        silent.send(0x06, struct.pack("<Q", 1))
        silent.until(ALIVE)

        process.send_signal(signal.SIGSTOP)
        procs.wait_state(process.pid, "T")
        used = time.monotonic() - heard
        assert fenced.lost().kind == "silent"
        # Wait for longer than the silent client's lease.
        assert clock.lost().kind == "silent"
        continued = time.monotonic()
        process.send_signal(signal.SIGCONT)

        assert patient.changes() == [("fenced", None)]
        # The silent client's lease resumes from the moment at which the store was stopped. The store knows
        # the length of the stop only to within the shortest interval.
        silent.refusal("silent")
        assert time.monotonic() - continued > 2.0 - used - 0.1


def test_a_slow_watcher_is_disconnected_and_other_watchers_get_all_changes():
    with serving() as store:
        writer = store.client()
        watcher = store.client()
        watcher.watch("")
        slow = store.raw(receive_buffer=4096).connected(attempts=1000)
        slow.send(0x04, bytes(8) + b"\x00" + text("") + b"\x00")
        value = bytes(1 << 19)
        written = 0
        while store.inner.sessions() == 3:
            assert written < 200
            writer.put(f"k/{written}", value)
            written += 1
        assert written > 16, "8 MiB and one message may wait"
        assert [watcher.changes() for _ in range(written)] == [[(f"k/{n}", value)] for n in range(written)]
        assert "8 MiB" in slow.refusal("slow")


def test_a_client_whose_program_reads_no_events_loses_its_lease():
    with serving() as store:
        stalled = store.client(interval=0.1, attempts=15, stall_timeout=0.2)
        assert procs.wait_readable(stalled.inner.fd)
        found = stalled.lost()
        assert (found.kind, "0.2 s" in found.message) == ("silent", True), found.message
        stalled.close()


def test_a_client_that_waits_for_events_does_not_count_as_stalled():
    with serving() as store:
        waiting = store.client(interval=0.1, attempts=10, stall_timeout=0.2)
        assert not waiting.inner.wait(1.5)
        assert waiting.put("k") == 1


def test_closing_the_store_is_reported_as_a_closed_connection():
    with serving() as store:
        client = Client(store.port).connected()
    found = client.lost()
    assert found.kind == "closed"
    assert not client.inner.wait(None), "nothing can come after the end"
    client.close()


def test_a_closed_session_reports_no_further_events():
    with serving() as store:
        client = store.client()
        client.inner.close()
        assert client.inner.take() == []
        assert not client.inner.wait(None)
        client.inner.txn(1, [], [])


def test_a_store_that_stops_listening_keeps_its_sessions_and_can_resume():
    with serving() as store:
        client = store.client()
        store.inner.stop_listening()
        refused = Client(store.port)
        assert refused.lost().kind == "refused"
        assert client.put("k") == 1
        store.inner.listen_again()
        store.client()
        assert store.inner.sessions() == 2
        refused.close()


def has_ended(connection: socket.socket) -> bool:
    """Return true if the peer has closed the connection."""
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while connection.recv(4096):
            continue
        return True
    return False


def test_the_connection_of_a_lost_session_stays_open_until_its_release(group):
    supervisor = group.supervisor
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(listener.getsockname()[1], supervisor=supervisor)
        connection, _ = listener.accept()
    with connection:
        connection.settimeout(procs.HANG)
        welcome = struct.pack("<HH", MAJOR, 0) + text(RUN) + b"\0"
        ready = struct.pack("<QQII", 1, 0, 1000, 60_000) + b"\0" + bytes(32) + b"\1" + bytes(3 + 16)
        connection.sendall(MAGIC + frame(0x81, welcome) + frame(READY, ready))
        client.connected()
        group.start(["sleep", "inf"])
        # The client gives up after this protocol error, while its workers are still running.
        connection.sendall(frame(0x81, b""))
        assert client.lost().kind == "protocol"
        client.close()
        supervisor.fence_at(None)
        # By the end of the stop, the nursery has handled all earlier requests.
        supervisor.stop(_core.StopPolicy(signal.SIGKILL, 0.0))
        group.end()
        assert not has_ended(connection)
        supervisor.release_connection()
        connection.setblocking(True)
        while connection.recv(4096):
            continue


def test_the_clock_offset_on_one_machine_is_within_its_error_bound():
    with serving() as store:
        client = store.client()
        client.put("k")
        while (clock := client.inner.clock()) is None:
            client.put("k")
        offset, error = clock
        assert abs(offset) <= error


def test_a_supervisor_can_run_both_a_store_and_its_client():
    supervisor = _core.Supervisor()
    try:
        with serving(supervisor=supervisor) as store:
            client = Client(store.port, supervisor=supervisor)
            supervisor.watch_fd(client.inner.fd)
            event = supervisor.next_event(procs.HANG)
            assert isinstance(event, _core.FdReady)
            assert event.fd == client.inner.fd
            supervisor.unwatch_fd(client.inner.fd)
            client.connected()
            assert client.put("k") == 1
            client.close()
            client = store.client(supervisor=supervisor)
            supervisor.close()
            assert "runtime" in client.lost().message
    finally:
        supervisor.close()
        del supervisor
