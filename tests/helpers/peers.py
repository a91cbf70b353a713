"""A peer on loopback whose answers a test decides."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from helpers.procs import HANG


@contextmanager
def peer(serve: Callable[[socket.socket], object]) -> Iterator[tuple[str, int]]:
    """Call a function for each connection, one at a time, in a thread. An error ends only the connection that
    it occurs in.

    Yields:
        the host and the port.
    """

    def run() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(HANG)


@contextmanager
def answering(answer: bytes) -> Iterator[tuple[str, int]]:
    """On each connection, wait for data, send these bytes and close the connection."""

    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(answer)

    with peer(serve) as address:
        yield address
