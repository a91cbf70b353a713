"""Downloading the final state from slow, dead and broken peers."""

import hashlib
import logging
import select
import socket
import struct
import threading
from contextlib import contextmanager

import pytest
from helpers import peers
from helpers.procs import HANG

from elasticrs._engine.inside import handover
from elasticrs.train import final_state

CONTENT = b"the final state"


def seat(server, content=CONTENT):
    return {**server, "slot": "", "sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}


@pytest.fixture
def server():
    """Yield the address and secret of a real server that has a copy of the final state."""
    yield final_state._serve(memoryview(CONTENT), ("127.0.0.1", 1))
    final_state.stop_serving()


@contextmanager
def peer(serve):
    """Run a peer that handles each connection with ``serve``, and yield its address and a secret."""

    with peers.peer(serve) as address:
        yield {"address": address, "secret": "x"}


def send_slowly(connection):
    """Send the copy, one byte every 0.1 s. Return at once if the client sends no secret."""
    if not connection.recv(1000):
        return
    for byte in CONTENT:
        connection.sendall(bytes([byte]))
        select.select([connection], [], [], 0.1)


def test_a_download_skips_a_slow_peer(monkeypatch, server):
    monkeypatch.setattr(handover, "TRANSFER_TIMEOUT", 0.5)
    monkeypatch.setattr(final_state.random, "shuffle", lambda _: None)
    with peer(send_slowly) as slow:
        assert final_state._fetch([seat(slow)]) == (None, None)
        content, near = final_state._fetch([seat(slow), seat(server)])
    assert content == CONTENT
    assert near == tuple(server["address"])


def test_the_only_live_peer_among_many_is_found(server):
    closed = socket.create_server(("127.0.0.1", 0))
    dead = {"address": closed.getsockname(), "secret": "x"}
    closed.close()
    seats = [seat(dead) for _ in range(100)]
    assert final_state._fetch(seats) == (None, None)
    seats[57] = seat(server)
    assert final_state._fetch(seats)[0] == CONTENT


def test_a_peer_with_different_content_is_skipped(monkeypatch, server):
    monkeypatch.setattr(final_state.random, "shuffle", lambda _: None)
    wrong = seat(server, b"another state")
    assert final_state._fetch([wrong]) == (None, None)
    assert final_state._fetch([wrong, seat(server)])[0] == CONTENT


def test_a_client_without_the_secret_gets_nothing(server):
    assert final_state._fetch([seat({**server, "secret": "x" * len(server["secret"])})]) == (None, None)


class Told(logging.Handler):
    """Keeps the log records."""

    def __init__(self):
        super().__init__()
        self.records = []
        self.is_there = threading.Event()

    def emit(self, record):
        self.records.append(record)
        self.is_there.set()


def test_a_download_reset_by_the_client_is_logged_in_one_line(capfd):
    told, log = Told(), logging.getLogger("elasticrs.train")
    log.addHandler(told)
    try:
        server = final_state._serve(memoryview(bytes(1 << 26)), ("127.0.0.1", 1))
        with socket.create_connection(server["address"]) as client:
            client.sendall(f"{server['secret']} \n".encode())
            assert client.recv(1)
            # Reset the connection, as the kernel does for a process that is killed.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert told.is_there.wait(HANG)
        final_state.stop_serving()
    finally:
        log.removeHandler(told)
    (record,) = told.records
    assert "127.0.0.1" in record.getMessage()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("near", "local", "expected"),
    [
        ("node1", "10.0.0.7", ("10.0.0.7", "10.0.0.7")),
        ("node1", "127.0.1.1", ("", "node1")),
        ("node1", "::1", ("::", "node1")),
        ("localhost", "127.0.0.1", ("127.0.0.1", "127.0.0.1")),
        ("127.0.0.1", "127.0.0.1", ("127.0.0.1", "127.0.0.1")),
        ("::1", "::1", ("::1", "::1")),
    ],
)
def test_the_serving_address_is_reachable_from_other_machines(near, local, expected):
    assert handover.serving_address(near, local) == expected
