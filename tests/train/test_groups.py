"""Which sockets are shut down, and which are never touched."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from elasticrs.train.groups import Connections, connect


def pair():
    """A connection over TCP, and the listener that it came through."""
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    return listener, one, other


def close(*sockets):
    for each in sockets:
        each.close()


def test_recorded_connections_end_and_others_do_not():
    connections = Connections()
    before = pair()
    with connections.recorded():
        inside = pair()
    after = pair()
    assert connections.shut() == 2
    assert inside[1].recv(1) == inside[2].recv(1) == b""
    for _, one, other in (before, after):
        one.sendall(b"x")
        assert other.recv(1) == b"x"
    assert connections.shut() == 0, "what is shut is not shut again"
    close(*before, *inside, *after)


def test_the_listener_goes_on():
    connections = Connections()
    with connections.recorded():
        listener, one, other = pair()
        idle = socket.socket()
        datagrams = socket.socket(type=socket.SOCK_DGRAM)
    connections.shut()
    late = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    late.sendall(b"x")
    assert accepted.recv(1) == b"x"
    # One that was not connected yet may still become a listener.
    idle.bind(("127.0.0.1", 0))
    idle.listen()
    socket.create_connection(idle.getsockname()).close()
    close(listener, one, other, late, accepted, idle, datagrams)


def test_connections_end_while_they_are_being_made():
    connections = Connections()
    with connections.recorded():
        listener, one, other = pair()
        connections.shut()
        assert one.recv(1) == b""
    close(listener, one, other)


def test_a_thread_that_reads_is_woken():
    connections = Connections()
    with connections.recorded():
        listener, one, other = pair()
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(one.recv(1)))
    reader.start()
    connections.shut()
    reader.join()
    assert got == [b""]
    close(listener, one, other)


def test_a_number_that_was_used_again_is_not_shut():
    connections = Connections()
    with connections.recorded():
        listener, one, other = pair()
    number = one.fileno()
    close(listener, one, other)
    again = pair()
    assert number in {each.fileno() for each in again}
    assert connections.shut() == 0
    again[1].sendall(b"x")
    assert again[2].recv(1) == b"x"
    close(*again)


def test_a_forked_child_gives_up_its_copies():
    connections = Connections()
    with connections.recorded():
        listener, one, other = pair()
    unrelated = pair()
    by_port = pair()
    ports = {by_port[0].getsockname()[1]}
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        connections.leave_to_parent(ports)
        os.write(write, b"x")
        threading.Event().wait()
    os.read(read, 1)
    close(one, by_port[1])
    # The child is there, and its copies do not keep the connections.
    assert other.recv(1) == by_port[2].recv(1) == b""
    close(unrelated[1])
    unrelated[2].settimeout(0.1)
    with pytest.raises(TimeoutError):
        unrelated[2].recv(1)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)
    close(listener, other, *unrelated, by_port[0], by_port[2])


def test_a_store_that_is_gone_is_not_waited_for_when_the_round_is_over():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(RuntimeError, match="the round has ended"):
        connect("127.0.0.1", port, lambda: True)


@pytest.mark.torch
def test_each_group_gives_back_the_hook_for_uncaught_exceptions():
    """Torch puts one more prefix before each line with each group."""
    program = """
import datetime, sys
from torch import distributed
from elasticrs.train import groups
before = sys.excepthook
for _ in range(3):
    groups.create("gloo", distributed.HashStore(), 0, 1, datetime.timedelta(seconds=60))
    assert sys.excepthook is not before
    groups.destroy()
    assert sys.excepthook is before
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
