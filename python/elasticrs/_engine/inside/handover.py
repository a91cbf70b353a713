"""Transfers training state from one worker to another over TCP. One worker serves it, others download it.

A client sends a line with a secret and the name of the part of the state that it wants, and receives the
bytes of that part. The client has to know in advance how many bytes the part has. If the training goes on
during a transfer, the bytes are sent in chunks with a checksum each (:func:`in_chunks`), and not faster than
a :class:`Pace` allows.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import signal
import socket
import sys
import threading
import time
import zlib
from contextlib import contextmanager, suppress
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import TYPE_CHECKING

from elasticrs._engine.job.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

CONNECT_TIMEOUT = 3.0
"""Timeout for connecting to one worker, in seconds. A node that is down does not refuse connections."""

TRANSFER_TIMEOUT = 30.0
"""Timeout in seconds for a transfer that receives no data."""

MIN_RATE = 1 << 20
"""Minimum rate in bytes per second. A transfer's time limit is size / rate + :data:`TRANSFER_TIMEOUT`."""

CHUNK = 4 << 20
"""Number of bytes of a chunk. Before each chunk, the server sends the chunk's CRC-32 (a checksum)."""

_BURST = 0.05
"""Maximum seconds by which a sender with a limited rate may be early, to make up for a delay before."""

_POLL_INTERVAL = 3600.0
"""Seconds between two wake-ups of the server's thread without a client. It has nothing to do then."""

_CRC = 4
_MAX_LINE = 256


@contextmanager
def without_signals() -> Iterator[None]:
    """Have all threads that are started in this context block all signals except those of faults, such as
    SIGSEGV. Otherwise, such a thread could get a signal for which the program waits with ``sigwait``.
    """
    faults = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Offer(Value):
    """Address of the server that sends the state, and the secret that its clients have to send."""

    address: tuple[str, int]
    secret: str


class _Server(ThreadingTCPServer):
    daemon_threads = True
    failed: Callable[[str], object]

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 -- signature of the base class
        """Report one line. The base class would write a traceback to the worker's stderr."""
        error = sys.exc_info()[1]
        self.failed(f"{client_address[0]}: {type(error).__name__}: {error}")


class _Server6(_Server):
    address_family = socket.AF_INET6


_servers: set[_Server] = set()


class Handover:
    """Server that sends parts of a state to clients that know the secret.

    Args:
        parts: returns the bytes of a part, in pieces. Its argument is the name of the part. It is called in
            the threads that serve the clients, and raises ``LookupError`` if there is no such part.
        near: host and port of another worker. The server listens on the network interface that leads there.
        failed: is called with an error message if a part could not be sent.

    Raises:
        OSError: no socket can be opened.
    """

    def __init__(
        self,
        parts: Callable[[str], Iterable[memoryview]],
        near: tuple[str, int],
        failed: Callable[[str], object],
    ) -> None:
        secret = secrets.token_urlsafe(32)

        class Handler(StreamRequestHandler):
            timeout = TRANSFER_TIMEOUT

            def handle(self) -> None:
                received, _, part = self.rfile.readline(_MAX_LINE).rstrip(b"\n").partition(b" ")
                if hmac.compare_digest(received, secret.encode()):
                    for piece in parts(part.decode("ascii", "replace")):
                        self.wfile.write(piece)

        family, local = _address_towards(near)
        host, shown = serving_address(near[0], local)
        self._server = (_Server6 if family == socket.AF_INET6 else _Server)((host, 0), Handler)
        self._server.failed = failed
        _servers.add(self._server)
        self.offer = Offer((shown, self._server.server_address[1]), secret)
        with without_signals():
            threading.Thread(
                target=self._server.serve_forever,
                args=(_POLL_INTERVAL,),
                name="elasticrs-handover",
                daemon=True,
            ).start()

    def close(self) -> None:
        """Accept no further client. Idempotent."""
        if self._server in _servers:
            _servers.remove(self._server)
            # Wake the server's thread. Without a client, it would not notice that it is to end.
            self._server.socket.shutdown(socket.SHUT_RDWR)
            self._server.shutdown()
            self._server.server_close()


def serving_address(near: str, local: str) -> tuple[str, str]:
    """Return the address to listen on, and the address to publish. ``local`` is this machine's address on the
    route to another worker, ``near``. If it is a loopback address, it is useless to other machines. If
    ``near`` is a name, it is then this machine's name, so publish that.
    """
    if ipaddress.ip_address(local).is_loopback and near != "localhost":
        with suppress(ValueError):
            ipaddress.ip_address(near)
            return local, local
        return "::" if ":" in local else "", near
    return local, local


def _address_towards(near: tuple[str, int]) -> tuple[int, str]:
    family, *_, address = socket.getaddrinfo(*near, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return family, probe.getsockname()[0]


class Pace:
    """Limits the bytes per second that all threads of this process together send to other workers.

    Args:
        rate: maximum bytes per second; 0 for no limit.
        now: function that returns the time in seconds.
    """

    def __init__(self, rate: float, now: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._now, self._lock = rate, now, threading.Lock()
        self._free_at = now()
        self.piece = min(CHUNK, max(1 << 16, int(rate / 50))) if rate else CHUNK
        """Number of bytes to send between two pauses. It is small at a low rate, so that pauses are short."""

    def delay(self, size: int) -> float:
        """Return how many seconds to wait before sending ``size`` bytes. Suppose that they are sent then."""
        if not self._rate:
            return 0
        with self._lock:
            begin = max(self._free_at, self._now() - _BURST)
            self._free_at = begin + size / self._rate
            return max(0.0, begin - self._now())


def in_chunks(data: memoryview, pace: Pace) -> Iterator[memoryview]:
    """Yield what is to be sent for a part of a state: for each chunk of ``data`` its checksum, and then its
    bytes in pieces. The client must receive them by :func:`take` with ``is_checked=True``. Sleep between the
    pieces, so that they are not sent faster than ``pace`` allows.
    """
    for at in range(0, len(data), CHUNK):
        chunk = data[at : at + CHUNK]
        yield memoryview(zlib.crc32(chunk).to_bytes(_CRC, "little"))
        for start in range(0, len(chunk), pace.piece):
            piece = chunk[start : start + pace.piece]
            if (delay := pace.delay(len(piece))) > 0:
                time.sleep(delay)
            yield piece


def take(
    offer: Offer, part: str, into: memoryview, *, is_checked: bool = False, least_rate: float = MIN_RATE
) -> None:
    """Download a part of the state that another worker offers, and write it into ``into``.

    Args:
        offer: address and secret of the other worker's server.
        part: name of the part.
        into: memory for the bytes of the part. It has the size of the part.
        is_checked: true if the other worker sends the part in chunks with checksums (:func:`in_chunks`).
        least_rate: minimum bytes per second. The time limit is size / rate + :data:`TRANSFER_TIMEOUT`.

    Raises:
        OSError: the other worker does not send the whole part in time, or a checksum is wrong.
    """
    # Limit the whole transfer, because the socket's own timeout restarts with each received byte.
    deadline = time.monotonic() + TRANSFER_TIMEOUT + len(into) / least_rate
    with socket.create_connection(offer.address, CONNECT_TIMEOUT) as connection:
        connection.sendall(f"{offer.secret} {part}\n".encode())
        if not is_checked:
            _receive(connection, into, deadline)
            return
        crc = memoryview(bytearray(_CRC))
        for at in range(0, len(into), CHUNK):
            _receive(connection, crc, deadline)
            chunk = into[at : at + CHUNK]
            _receive(connection, chunk, deadline)
            if zlib.crc32(chunk) != int.from_bytes(crc, "little"):
                raise ConnectionError("a chunk was damaged on its way")


def _receive(connection: socket.socket, into: memoryview, deadline: float) -> None:
    at = 0
    while at < len(into):
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError("the transfer was too slow")
        connection.settimeout(min(TRANSFER_TIMEOUT, left))
        received = connection.recv_into(into[at:])
        if not received:
            raise ConnectionError("the connection ended too early")
        at += received


def _after_fork_in_child() -> None:
    # Close the servers in a forked child. Otherwise, the child would keep the ports open, but not answer.
    while _servers:
        _servers.pop().server_close()


os.register_at_fork(after_in_child=_after_fork_in_child)
