"""Misbehaving connections are closed with one line each, while a real client keeps working."""

import socket
import struct
import subprocess
import sys

import pytest
from helpers.torch_clients import GREETING

from elasticrs import _core


def raw(store):
    connection = socket.create_connection(("localhost", store.port), timeout=20)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def text(*fields):
    return b"".join(struct.pack("<Q", len(field)) + field for field in fields)


def is_closed_by_the_other_side(connection):
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return True


@pytest.mark.torch
def test_a_client_that_does_not_read_delays_no_other_client(connect, store):
    client = connect()
    client.call("set", "large", bytes(1 << 20))
    with raw(store) as stopped:
        # Request half a gigabyte of replies, without reading any.
        stopped.sendall(GREETING + 512 * (b"\x03" + text(b"/large")))
        for number in range(100):
            assert client.call("add", "n", 1) == number + 1
    assert store.take_notices() == []


def test_a_worker_store_reports_problems_through_its_supervisor():
    supervisor = _core.Supervisor()
    store = _core.WorkerStore()
    store.serve(supervisor)
    with raw(store) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert is_closed_by_the_other_side(connection)
    event = supervisor.next_event(20.0)
    assert isinstance(event, _core.Degraded)
    assert "TCPStore" in event.message
    supervisor.close()
    store.close()
    with pytest.raises(_core.SupervisorError, match="is closed"):
        store.serve()


def test_a_worker_store_closes_with_its_supervisor():
    supervisor = _core.Supervisor()
    store = _core.WorkerStore()
    store.serve(supervisor)
    with raw(store) as connection:
        connection.sendall(GREETING + b"\x07")
        assert connection.recv(8, socket.MSG_WAITALL) == bytes(8)
        supervisor.close()
        assert is_closed_by_the_other_side(connection)
    assert store.waiting() == {}
    store.close()


def test_closing_the_store_in_a_forked_child_does_not_affect_the_parent():
    program = """
import os
from elasticrs import _core
store = _core.WorkerStore()
store.serve()
pid = os.fork()
if pid == 0:
    store.close()
    del store
    os._exit(0)
os.waitpid(pid, 0)
import socket
with socket.create_connection(("localhost", store.port)) as connection:
    connection.sendall(bytes.fromhex("00cef7853c07"))
    assert connection.recv(8, socket.MSG_WAITALL) == bytes(8)
store.close()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=20)


def test_a_port_that_cannot_be_bound_is_named():
    first = _core.WorkerStore()
    with pytest.raises(OSError, match=rf"all addresses, port {first.port}"):
        _core.WorkerStore(None, (first.port, first.port))
    last = min(first.port + 50, 65535)
    second = _core.WorkerStore("localhost", (first.port, last))
    assert first.port <= second.port <= last
    for store in (first, second):
        store.close()
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        _core.WorkerStore("192.0.2.1")
