"""A store with a state file is killed, stopped and restarted, and refuses invalid files."""

import errno
import os
import resource
import select
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import procs
from helpers.coordination import (
    MAGIC,
    MAJOR,
    READY,
    REPLY,
    RUN,
    Client,
    Patient,
    RawClient,
    put,
    store_command,
    text,
    transaction,
)
from helpers.said import says

from elasticrs import _core
from elasticrs._core import Compare, Op
from elasticrs._engine.nodes.transport.coordination import NativeSession, Notice, Put
from elasticrs._engine.nodes.transport.store import Requests

pytestmark = pytest.mark.beyond_torchrun

GRACE = 60.0
"""Longer than any test."""


class Kept:
    """``python -m elasticrs.store --state`` in a separate process."""

    def __init__(
        self, file: Path, *options: str, grace: float = GRACE, stderr: int = subprocess.PIPE
    ) -> None:
        self.clients: list[RawClient] = []
        command = store_command("--state", file, "--grace", grace, *options)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.port = int(line.rpartition(":")[2]) if line else None

    def client(self, **options: float) -> Client:
        assert self.port is not None
        return Client(self.port, interval=60.0, **options).connected()

    def end(self, signum: signal.Signals = signal.SIGKILL) -> tuple[int, str]:
        """Send the signal, and return the exit code and the output on stderr."""
        self.process.send_signal(signum)
        return self.ended()

    def ended(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=procs.HANG)
        return self.process.returncode, said


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def keep(state: Path) -> Iterator[Callable[..., Kept]]:
    """Return a function that starts a store, with the same state file unless another one is given."""
    started: list[Kept] = []

    def start(*options: str, file: Path = state, **how: Any) -> Kept:
        started.append(Kept(file, *options, **how))
        return started[-1]

    yield start
    for store in started:
        store.end()
        for client in store.clients:
            client.close()


class Ready(NamedTuple):
    """The store's reply that starts a session, parsed, and the raw client that received it."""

    client: RawClient
    session: int
    revision: int
    ttl_ms: int
    secret: bytes
    ids: list[bytes]


def hello(
    store: Kept, *, resume: Ready | None = None, confirmed: bytes | None = None, interval_ms: int = 60_000
) -> RawClient:
    assert store.port is not None
    client = RawClient(store.port)
    store.clients.append(client)
    body = struct.pack("<HH", MAJOR, 0) + text(RUN) + struct.pack("<IH", interval_ms, 5) + bytes(32)
    body += b"\0" if resume is None else struct.pack("<BQ", 1, resume.session) + resume.secret
    body += b"\0" if confirmed is None else b"\1" + confirmed
    client.socket.sendall(MAGIC)
    client.send(0x01, body)
    assert client.exactly(len(MAGIC)) == MAGIC
    return client


def entered(client: RawClient) -> Ready:
    ready = client.until(READY)
    session, revision, _, ttl_ms, has_proof = struct.unpack_from("<QQIIB", ready)
    assert not has_proof
    secret, (count,) = ready[25:57], struct.unpack_from("<I", ready, 57)
    ids = [ready[61 + 16 * at : 77 + 16 * at] for at in range(count)]
    return Ready(client, session, revision, ttl_ms, secret, ids)


def everything(client: Client) -> list[tuple[str, bytes, int, int]]:
    (entries,) = client.txn(then=[Op.range("", 0)]).results
    return [(each.key, each.value, each.create_revision, each.mod_revision) for each in entries]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_keys_and_revisions_survive_a_store_restart(keep, signum):
    store = keep()
    with closing(store.client()) as client:
        client.put("a", b"1")
        client.put("b", b"x" * 100_000)
        client.put("leased", b"", leased=True)
        client.put("a", b"2")
        client.txn(then=[Op.delete("b")])
        before = everything(client)
        assert before == [("a", b"2", 1, 4), ("leased", b"", 3, 3)]
        assert store.end(signum)[0] == (0 if signum == signal.SIGTERM else -signum)
    again = keep()
    with closing(again.client()) as client:
        assert everything(client) == before
        assert client.put("c") == 6


def test_a_session_resumes_after_a_store_restart_and_ends_on_disconnect(keep):
    store = keep()
    first = entered(hello(store))
    first.client.socket.sendall(transaction(put("mine", leased=True)))
    first.client.until(REPLY)
    store.end()
    again = keep()
    with closing(again.client()) as watcher:
        watcher.watch("mine", exact=True)
        stranger = hello(again, resume=first._replace(secret=bytes(32)))
        stranger.refusal("gone")
        second = entered(hello(again, resume=first, confirmed=first.ids[0]))
        assert second[1:3] == (first.session, 1)
        assert second.ids[1:] == first.ids
        other = entered(hello(again))
        assert other.session > first.session
        assert everything(watcher) == [("mine", b"", 1, 1)]
        second.client.close()
        assert watcher.changes() == [("mine", None)]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_resumed_client_loses_no_request_watch_or_lease(keep, signum):
    # No other test uses this address, so its port is free when the store comes back.
    host = f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}.1"
    store = keep("--host", host)
    with closing(Patient(store.port, host=host, interval=60.0, resume=True).connected()) as client:
        client.put("mine", b"1", leased=True)
        client.watch("")
        store.end(signum)
        # Send a request while there is no store.
        client.tag += 1
        client.inner.txn(client.tag, [Compare.exists("mine")], [Op.put("mine", b"2", True)], [])
        again = keep("--host", host, "--port", str(store.port))
        reply = client.reply()
        assert (reply.ok, reply.revision) == (True, 2)
        assert client.changes() == [("mine", b"2")]
        assert everything(client) == [("mine", b"2", 1, 2)]
        with closing(Client(again.port, host=host, interval=60.0).connected()) as watcher:
            watcher.watch("mine", exact=True)
            client.close()
            assert watcher.changes() == [("mine", None)]


def test_a_pending_request_is_answered_after_a_store_restart(keep):
    host = f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}.2"
    store, heard = keep("--host", host), []

    class Listening(NativeSession):
        def take(self):
            found = super().take()
            heard.extend(map(type, found))
            return found

    client = _core.CoordinationClient(host, store.port, run_id=RUN, interval=60.0, resume=True)
    with closing(Requests(lambda: Listening(client))) as requests, ThreadPoolExecutor(1) as other:
        requests.connect()
        store.end()
        reply = other.submit(requests.txn, (), [Put("mine", b"1", False)])
        procs.wait_until(lambda: Notice in heard)
        keep("--host", host, "--port", str(store.port))
        assert reply.result(procs.HANG).ok


def test_a_store_started_empty_or_from_a_copy_counts_as_a_different_store(keep, state, tmp_path):
    keep().end()
    copy = tmp_path / "copy"
    shutil.copy(state, copy)
    store = keep()
    met = entered(hello(store))
    for other in (keep(file=copy), keep(file=tmp_path / "empty")):
        client = hello(other, confirmed=met.ids[0])
        client.refusal("other")
        assert other.process.stderr is not None
        # Skip the line in which the store describes the state that it starts with.
        other.process.stderr.readline()
        assert "refused 127.0.0.1" in other.process.stderr.readline()
    # A client that knows only the earlier run of this store is accepted, too.
    entered(hello(store, confirmed=met.ids[1]))


def fails(keep: Callable[..., Kept], *options: str, **how: Path) -> str:
    code, said = keep(*options, **how).ended()
    assert code == 1
    assert said.count("\n") == 1, said
    return said.removeprefix("elasticrs store: ").rstrip("\n")


def test_an_invalid_state_file_is_named_and_left_unchanged(keep, state, tmp_path):
    store = keep("--run-id", RUN)
    says(fails(keep, "--run-id", RUN), "running", str(state))
    with closing(store.client()) as client:
        client.put("a", bytes(5000))
    store.end(signal.SIGTERM)
    written = state.read_bytes()
    says(fails(keep), str(state), f"run {RUN}")
    assert state.read_bytes() == written

    def of(content: bytes) -> str:
        file = tmp_path / "other"
        file.write_bytes(content)
        said = fails(keep, file=file)
        assert file.read_bytes() == content
        return said.replace(str(file), "FILE")

    says(of(b"#!/bin/sh\nexit 1\n"), "FILE is not")
    for length in (len(written) - 1, len(written) // 2, 21):
        says(of(written[:length]), "FILE", "damaged", "byte ")
    says(of(written[:8] + b"\7" + written[9:]), "newer", "FILE", "format 7", "1")
    says(fails(keep, file=tmp_path), str(tmp_path), os.strerror(errno.EISDIR))
    nowhere = Path("/sys/elasticrs-state")
    says(fails(keep, file=nowhere), f"{nowhere}: ")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["other", "state"]


def test_a_full_disk_stops_the_store_without_damaging_its_state(keep, state):
    store = keep()
    with closing(store.client()) as client:
        client.put("a", b"1")
        size = state.stat().st_size
        resource.prlimit(store.process.pid, resource.RLIMIT_FSIZE, (size, size))
        client.inner.txn(9, [], [Op.put("b", b"2", False)], [])
        # The store exits without a reply.
        assert isinstance(client.next(), _core.ConnectionLost)
    code, said = store.ended()
    assert code == 1
    says(said.splitlines()[-1], f"{state}: {os.strerror(errno.EFBIG)}")
    with closing(keep().client()) as client:
        assert everything(client) == [("a", b"1", 1, 1)]


def test_partial_records_in_the_state_file_are_skipped_and_reported(keep, state):
    store = keep()
    with closing(store.client()) as client:
        client.put("a", b"1")
        store.end(signal.SIGKILL)
    torn = b"\xff\0\0\0 the beginning of a record"
    with state.open("ab") as file:
        file.write(torn)
    again = keep()
    with closing(again.client()) as client:
        assert everything(client) == [("a", b"1", 1, 1)]
    assert f"the last {len(torn)} bytes" in again.end(signal.SIGTERM)[1]


def test_a_signal_that_is_faster_than_a_line_does_not_suppress_it(keep, state):
    keep().end()
    torn = b"\xff\0\0\0 the beginning of a record"
    with state.open("ab") as file:
        file.write(torn)
    reads, writes = os.pipe()
    with open(reads, "rb") as said, open(writes, "wb", buffering=0) as full:
        # Fill the pipe, so that the store blocks when it writes its first line.
        os.set_blocking(writes, False)
        while full.write(bytes(select.PIPE_BUF)):
            pass
        os.set_blocking(writes, True)
        again = keep(stderr=writes)
        again.process.send_signal(signal.SIGTERM)
        full.close()
        lines = said.read().lstrip(b"\0").decode()
        assert again.process.wait(procs.HANG) == 0
    # The store may write the line before or after it notices the signal.
    says(lines, f"the last {len(torn)} bytes")
    says(lines, "SIGTERM")
