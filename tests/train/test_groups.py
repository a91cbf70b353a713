"""A group's connections are shut down, and other sockets are never touched."""

import os
import resource
import socket
import sys
import threading

import pytest

from elasticrs.train.groups import Connections, connect
from elasticrs.train.rendezvous import STUCK_TIMEOUT


def gloo_socket():
    made = socket.socket()
    made.set_inheritable(True)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def gloo_listener():
    listener = gloo_socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


def pair():
    """Return a listener and both ends of a TCP connection, with gloo's socket options."""
    listener, one = gloo_listener(), gloo_socket()
    one.connect(listener.getsockname())
    other, _ = listener.accept()
    other.set_inheritable(True)
    return listener, one, other


def plain_pair():
    """Return a listener and both ends of a TCP connection, with Python's default options."""
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    return listener, one, other


def close(*sockets):
    for each in sockets:
        each.close()


def test_only_recorded_connections_are_shut():
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


def test_connections_of_other_threads_are_shut_only_as_a_last_resort():
    connections = Connections()
    before = plain_pair()
    with connections.recorded():
        inside, group = plain_pair(), pair()
        assert connections.shut() == 2
        assert connections.knock(1) == 1, "the listener of another thread is not visited"
    assert connections.shut() == 0
    inside[1].sendall(b"x")
    assert inside[2].recv(1) == b"x"
    ports = sorted(f"127.0.0.1 port {each.getpeername()[1]}" for each in inside[1:])
    peers = connections.shut_others()
    assert sorted(peers) == ports
    assert inside[1].recv(1) == b""
    assert connections.shut_others() == []
    before[1].sendall(b"x")
    assert before[2].recv(1) == b"x"
    close(*before, *inside, *group)


def test_the_store_client_is_shut_whatever_its_socket_options():
    listener = socket.create_server(("127.0.0.1", 0))
    connections = Connections(listener.getsockname()[1])
    with connections.recorded():
        client = socket.create_connection(listener.getsockname())
    assert connections.shut() == 1
    assert client.recv(1) == b""
    close(listener, client)


def test_are_intact_checks_only_the_connections_of_the_group():
    connections = Connections()
    with connections.recorded():
        inside, group = plain_pair(), pair()
    close(*inside)
    assert connections.are_intact()
    close(*group)
    assert not connections.are_intact()


def test_a_listener_stays_open_after_shut():
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
    # A socket that was not connected yet can still become a listener.
    idle.bind(("127.0.0.1", 0))
    idle.listen()
    socket.create_connection(idle.getsockname()).close()
    close(listener, one, other, late, accepted, idle, datagrams)


def test_shutting_a_connection_wakes_a_reading_thread():
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


def test_knock_connects_to_a_gloo_listener_once_for_each_peer():
    connections = Connections()
    before = socket.create_server(("127.0.0.1", 0))
    with connections.recorded():
        listener = gloo_listener()
        assert connections.knock(3) == 1
        assert connections.knock(3) == 0
    after = socket.create_server(("127.0.0.1", 0))
    assert connections.knock(3) == 0, "no group is being made"
    numbers = []
    for _ in range(3):
        visitor, _ = listener.accept()
        numbers.append(int.from_bytes(visitor.recv(8), sys.byteorder))
        assert visitor.recv(1) == b""
        visitor.close()
    assert numbers == [0, 1, 2]
    for each in (before, listener, after):
        each.setblocking(False)
        with pytest.raises(BlockingIOError):
            each.accept()
    close(before, listener, after)


def test_knock_does_nothing_with_few_descriptors_or_another_transport(monkeypatch):
    connections = Connections()
    with connections.recorded(), gloo_listener():
        assert connections.knock(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) == 0
        monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "TCP_TLS")
        assert connections.knock(2) == 0


MAKES_A_GROUP_WITH_ONE_THAT_IS_GONE = """
import datetime, os, struct, sys, threading
from torch import distributed
from elasticrs.train import groups

class Store(distributed.Store):
    # Rank 1 has told where it listens, behind this one's port: so this one waits for it. Then it has died.
    def __init__(self):
        super().__init__()
        self.values = distributed.HashStore()
        self.is_told = threading.Event()
    def set(self, key, value):
        self.values.set(key, value)
        if key.endswith("/0"):
            other = bytearray(value)
            at = 8 + struct.unpack_from("=q", other)[0] + 8 + 2
            port = struct.unpack_from("!H", other, at)[0]
            struct.pack_into("!H", other, at, port + 1)
            self.values.set(key[:-1] + "1", bytes(other))
            self.is_told.set()
    def get(self, key):
        return self.values.get(key)
    def wait(self, keys, *timeout):
        return self.values.wait(keys)
    def set_timeout(self, timeout):
        pass

store, connections, is_over = Store(), groups.Connections(), threading.Event()

def watch():
    store.is_told.wait()
    while not is_over.wait(0.01):
        connections.shut()
        connections.knock(2)

threading.Thread(target=watch).start()
try:
    with connections.recorded():
        groups.create("gloo", store, 0, 2, datetime.timedelta(seconds=60))
        distributed.barrier()
except RuntimeError as error:
    print("OUT", error)
is_over.set()
sys.stdout.flush()
os._exit(0)
"""


def test_group_creation_stops_if_a_peer_died_before_connecting(torch_programs):
    # Gloo itself would wait for five times its timeout, which is longer than this test may take.
    made = torch_programs.run(MAKES_A_GROUP_WITH_ONE_THAT_IS_GONE)
    assert made.stdout.startswith("OUT "), made


def test_a_reused_descriptor_number_is_not_shut():
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


def test_a_forked_child_closes_its_copies_of_the_connections():
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
    # The child is still running, but its copies do not keep the connections open.
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


def test_connect_does_not_wait_for_a_lost_store_after_the_round_ended():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(RuntimeError, match="the round has ended"):
        connect("127.0.0.1", port, lambda: True)


def test_destroying_a_group_restores_sys_excepthook(torch_programs):
    """Torch replaces the hook for each group. If elasticrs did not restore it, each group would add a prefix
    to each line.
    """
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
    torch_programs.checked(program)


def test_connect_gives_up_soon_if_the_store_closes_the_connection(torch_programs):
    program = """
import socket, threading, time
from torch import distributed
from elasticrs.train.groups import connect
listener = socket.create_server(("127.0.0.1", 0))

def end():
    listener.accept()[0].close()
    listener.close()

threading.Thread(target=end).start()
began = time.monotonic()
try:
    connect(*listener.getsockname(), lambda: False)
except RuntimeError:
    print(time.monotonic() - began)
"""
    took = float(torch_programs.checked(program))
    # The call must give up before a worker that waits for it would exit as stuck.
    assert took < STUCK_TIMEOUT
