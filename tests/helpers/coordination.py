"""Clients of the coordination store, for tests."""

import contextlib
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

from elasticrs import _core
from elasticrs._core import Op
from helpers.procs import HANG

RUN = "a-run"
MAJOR = 4
"""Version of the store's protocol."""


def store_command(*options: object, port: int = 0) -> list[str]:
    """Return the command line of a separate store on the loopback interface."""
    command = [sys.executable, "-m", "elasticrs.store", "--host", "127.0.0.1", "--port", str(port)]
    return [*command, *map(str, options)]


class Client:
    """A client and the events that it has received."""

    def __init__(self, port: int, *, host: str = "127.0.0.1", run_id: str = RUN, **options: Any) -> None:
        self.inner = _core.CoordinationClient(host, port, run_id=run_id, **options)
        self.tag = 0
        self.events: list[Any] = []

    def next(self, kind: type | tuple[type, ...] = object, timeout: float = HANG) -> Any:
        """Take the next event, which must be of this kind."""
        if not self.events:
            assert self.inner.wait(timeout), f"nothing came within {timeout} s"
            self.events = self.inner.take()
        event = self.events.pop(0)
        assert isinstance(event, kind), f"{type(event).__name__}: {getattr(event, 'message', event)}"
        return event

    def connected(self) -> "Client":
        self.next(_core.Connected)
        return self

    def reply(self) -> _core.Reply:
        """Take the reply to the last request, and keep the changes that arrived before it."""
        kept = []
        while not isinstance(event := self.next((_core.Reply, _core.Changes)), _core.Reply):
            kept.append(event)
        assert event.tag == self.tag
        self.events = kept + self.events
        return event

    def txn(self, compares: Any = (), then: Any = (), otherwise: Any = ()) -> _core.Reply:
        self.tag += 1
        self.inner.txn(self.tag, compares, then, otherwise)
        return self.reply()

    def put(self, key: str, value: bytes = b"", *, leased: bool = False) -> int:
        """Write a value and return the revision."""
        return self.txn(then=[Op.put(key, value, leased)]).revision

    def watch(self, prefix: str, **how: Any) -> _core.Reply:
        self.tag += 1
        self.inner.watch(self.tag, prefix, **how)
        return self.reply()

    def changes(self, timeout: float = HANG) -> list[tuple[str, bytes | None]]:
        """Take the changes of the next revision, as pairs of key and value."""
        return [(change.key, change.value) for change in self.next(_core.Changes, timeout).changes]

    def lost(self, timeout: float = HANG) -> _core.ConnectionLost:
        while not isinstance(event := self.next(timeout=timeout), _core.ConnectionLost):
            continue
        return event

    def close(self) -> None:
        """Close the client and drop the native object, because its descriptors stay open as long as it
        exists. Idempotent.
        """
        if hasattr(self, "inner"):
            self.inner.close()
            del self.inner


class Patient(Client):
    """A client that skips notices about an unreachable store, for tests that do not check how long a
    reconnect takes.
    """

    def next(self, kind: type | tuple[type, ...] = object, timeout: float = HANG) -> Any:
        while isinstance(event := super().next(timeout=timeout), _core.StoreNotice):
            continue
        assert isinstance(event, kind), f"{type(event).__name__}: {getattr(event, 'message', event)}"
        return event


MAGIC = b"\x93ERS\r\n\x1a\n"
READY, REFUSED, REPLY, ALIVE = 0x82, 0x83, 0x84, 0x86

KINDS = (
    *("refused", "unreachable", "timeout", "resolve", "version", "token", "not_ours", "run", "closed"),
    *("silent", "slow", "protocol", "limit", "gone", "other", "tls", "denied"),
)
"""Reasons for the end of a connection, by their code in the protocol."""


def text(value: str) -> bytes:
    return struct.pack("<H", len(value.encode())) + value.encode()


def frame(kind: int, body: bytes) -> bytes:
    return struct.pack("<IB", len(body) + 1, kind) + body


def transaction(*operations: bytes) -> bytes:
    """Return the message that requests these operations unconditionally."""
    return frame(0x03, struct.pack("<QII", 1, 0, len(operations)) + b"".join(operations) + bytes(4))


def put(key: str, value: bytes = b"", *, leased: bool = False) -> bytes:
    """Return an operation of a :func:`transaction`."""
    return b"\0" + text(key) + bytes([leased]) + struct.pack("<I", len(value)) + value


def get(key: str) -> bytes:
    """Return an operation of a :func:`transaction`."""
    return b"\3" + text(key)


class RawClient:
    """A client that writes protocol messages itself, so that it can stay silent, stop reading, or break the
    rules.
    """

    def __init__(self, port: int, *, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(HANG)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect(("127.0.0.1", port))

    def send(self, kind: int, body: bytes) -> None:
        self.socket.sendall(frame(kind, body))

    @staticmethod
    def greeting(
        *, major: int = MAJOR, run_id: str = RUN, interval_ms: int = 1000, attempts: int = 5
    ) -> bytes:
        """Return the first bytes that a client sends to the store."""
        body = struct.pack("<HH", major, 0) + text(run_id) + struct.pack("<IH", interval_ms, attempts)
        # An empty challenge, no session to resume, and no previously known store.
        return MAGIC + frame(0x01, body + bytes(32 + 2))

    def hello(
        self, *, major: int = MAJOR, run_id: str = RUN, interval_ms: int = 1000, attempts: int = 5
    ) -> None:
        self.socket.sendall(
            self.greeting(major=major, run_id=run_id, interval_ms=interval_ms, attempts=attempts)
        )
        assert self.exactly(len(MAGIC)) == MAGIC

    def connected(self, **hello: Any) -> "RawClient":
        self.hello(**hello)
        self.until(READY)
        return self

    def exactly(self, length: int) -> bytes:
        received = b""
        while len(received) < length:
            more = self.socket.recv(length - len(received))
            assert more, "the connection is closed"
            received += more
        return received

    def until(self, kind: int) -> bytes:
        """Return the body of the next message of this kind, and drop the messages before it."""
        while True:
            (length,) = struct.unpack("<I", self.exactly(4))
            message = self.exactly(length)
            if message[0] == kind:
                return message[1:]
            assert message[0] != REFUSED, message

    def refusal(self, kind: str) -> str:
        """Return the text of the store's refusal, which must be of this kind. Drop the messages before it."""
        body = self.until(REFUSED)
        message = body[3:].decode()
        assert KINDS[body[0]] == kind, f"{KINDS[body[0]]}: {message}"
        return message

    def close(self) -> None:
        self.socket.close()


class Server:
    """A server on a free port, and its clients. They are closed together with the server."""

    def __init__(self, host: str = "127.0.0.1", run_id: str | None = RUN, **options: Any) -> None:
        self.inner = _core.CoordinationServer([(host, 0)], run_id=run_id, **options)
        self.port = self.inner.port
        self._clients: list[Client | RawClient] = []

    def client(self, **options: Any) -> Client:
        client = Client(self.port, **options)
        self._clients.append(client)
        return client.connected()

    def raw(self, **options: Any) -> "RawClient":
        client = RawClient(self.port, **options)
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.inner.close()
        del self.inner


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[Server]:
    server = Server(**options)
    try:
        yield server
    finally:
        server.close()
