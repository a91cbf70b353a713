"""Requests that fail each time, although etcd and the connections to it work."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from helpers.coordination import Client
from helpers.etcd_client import EtcdClient
from helpers.procs import HANG

from elasticrs import _core
from elasticrs._core import Op

POISON = b"poison"
"""Requests that contain this text fail."""

DATA, HEADERS, RST_STREAM = 0, 1, 3
END = 0x5
"""HTTP/2 flags END_HEADERS and END_STREAM."""


def header(name: bytes, value: bytes) -> bytes:
    """Encode a header field as an HPACK literal."""
    return b"\0" + b"".join(bytes([len(text)]) + text for text in (name, value))


def grpc_status(code: int) -> bytes:
    fields = {b"content-type": b"application/grpc", b"grpc-status": b"%d" % code, b"grpc-message": POISON}
    # HPACK's static table has status 200 at index 8 and status 500 at index 14.
    return b"\x88" + b"".join(header(name, value) for name, value in fields.items())


FAILURES = {
    "HTTP status 500": (HEADERS, END, b"\x8e"),
    "UNKNOWN": (HEADERS, END, grpc_status(2)),
    "INTERNAL": (HEADERS, END, grpc_status(13)),
    "DATA_LOSS": (HEADERS, END, grpc_status(15)),
    "a reset stream": (RST_STREAM, 0, struct.pack(">I", 2)),
    "a closed connection": None,
}


class Proxy:
    """A proxy between a client and an etcd member. While ``is_failing``, it fails poisoned requests."""

    def __init__(self, target: tuple[str, int], failure: tuple[int, int, bytes] | None) -> None:
        self._target, self._failure = target, failure
        self.is_failing = False
        self._connections: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = self._listener.getsockname()
        self._run(self._accept)

    def _run(self, body, *arguments) -> None:
        self._threads.append(threading.Thread(target=body, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target, HANG)
            server.settimeout(None)
            self._connections.append((client, server))
            lock = threading.Lock()
            self._run(self._forward, client, server, lock, True)
            self._run(self._forward, server, client, lock, False)

    def _forward(self, source, target, lock, is_up) -> None:
        with suppress(OSError, EOFError), source.makefile("rb") as reader:
            if is_up:
                target.sendall(exactly(reader, 24))
            while True:
                head = exactly(reader, 9)
                kind, stream = head[3], head[5:]
                body = exactly(reader, int.from_bytes(head[:3], "big"))
                if not (is_up and kind == DATA and POISON in body and self.is_failing):
                    # Hold the lock when sending to the client, because both threads send frames to it.
                    with lock if not is_up else threading.Lock():
                        target.sendall(head + body)
                elif self._failure is None:
                    break
                else:
                    kind, flags, body = self._failure
                    with lock:
                        source.sendall(len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream + body)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def break_connections(self) -> None:
        for pair in self._connections:
            for each in pair:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(HANG)
        self.break_connections()
        for thread in self._threads:
            thread.join(HANG)
        for pair in self._connections:
            for each in pair:
                each.close()
        self._listener.close()


def exactly(reader, length: int) -> bytes:
    read = reader.read(length)
    if len(read) < length:
        raise EOFError
    return read


@pytest.fixture
def proxy(etcd, request) -> Iterator[Proxy]:
    made = Proxy(etcd.server.endpoints[0], request.param)
    yield made
    made.close()


@pytest.fixture
def connect(etcd, proxy, connect_etcd):
    """Return a function that connects a client through the proxy. ``limit`` is the number of seconds after
    which a request that keeps failing ends the session.
    """
    return lambda limit: connect_etcd(
        [proxy.endpoint], f"{etcd.prefix}/", ttl=60.0, read_timeout=limit
    ).connected()


@pytest.fixture
def client(connect) -> EtcdClient:
    return connect(3.0)


each_failure = pytest.mark.parametrize("proxy", FAILURES.values(), ids=FAILURES, indirect=True)


def next_notice(client: EtcdClient) -> _core.StoreNotice:
    # Call the method of the base class, because `EtcdClient.next` skips notices.
    return Client.next(client, _core.StoreNotice)


def notice_and_end(client: EtcdClient, text: str) -> tuple[_core.StoreNotice, _core.ConnectionLost]:
    """Return the first notice that contains this text, and the end of the session. On a loaded machine, an
    earlier notice may report a keep-alive that was not answered in time.
    """
    while text not in (notice := next_notice(client)).message:
        continue
    return notice, client.next(_core.ConnectionLost)


@each_failure
def test_a_request_that_always_fails_ends_the_session_after_the_timeout(client, proxy):
    client.put("k")
    proxy.is_failing = True
    client.inner.txn(client.tag + 1, [], [Op.put(POISON.decode(), b"", False)])
    notice, lost = notice_and_end(client, "failing")
    assert (lost.kind, "3 s" in lost.message) == ("timeout", True), lost
    assert "failing" in notice.message


@pytest.mark.parametrize(
    "proxy",
    [failure for failure in FAILURES.values() if failure is not None],
    ids=[name for name, failure in FAILURES.items() if failure is not None],
    indirect=True,
)
def test_a_watch_that_always_fails_ends_the_session_after_the_timeout(client, proxy):
    client.watch(POISON.decode())
    proxy.is_failing = True
    proxy.break_connections()
    notice, lost = notice_and_end(client, "etcd")
    assert (lost.kind, "3 s" in lost.message) == ("timeout", True), lost
    # The notice may be about etcd being unreachable, because each connection breaks before a keep-alive is
    # answered.
    assert "etcd" in notice.message


@each_failure
def test_a_request_that_fails_temporarily_is_applied_once(connect, proxy, etcd):
    client = connect(HANG)
    proxy.is_failing = True
    client.inner.txn(1000, [], [Op.put(POISON.decode(), b"v", False)])
    next_notice(client)
    proxy.is_failing = False
    reply = client.next(_core.Reply)
    assert (reply.tag, reply.ok) == (1000, True)
    assert etcd.keys()[f"/{POISON.decode()}"] == b"v"


def test_a_response_that_is_too_large_ends_the_session_at_once(etcd, connect_etcd):
    writer = connect_etcd(etcd.server.endpoints, f"{etcd.prefix}/").connected()
    for number in range(70):
        writer.put(f"large/{number}", bytes(1_000_000), leased=True)
    reader = connect_etcd(etcd.server.endpoints, f"{etcd.prefix}/").connected()
    reader.inner.txn(1, [], [Op.range("large/", 0)])
    lost = reader.lost()
    assert (lost.kind, "limit" in lost.message) == ("limit", True), lost
