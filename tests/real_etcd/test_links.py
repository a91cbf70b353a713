"""A killed session is noticed long before its lease ends, and only when nothing of its program is left."""

import contextlib
import socket
import subprocess
import sys

import pytest
from helpers.procs import HANG, reap_adopted, wait_readable, wait_until

SCOPE = "job"
SESSION = """
import socket, subprocess, sys
from elasticrs import _core

name, prefix, scope, port = sys.argv[1:5]
no = ("ca_cert", "cert", "key", "user", "password", "job_lease", "stall_timeout", "supervisor")
client = _core.CoordinationClient.etcd(
    [("127.0.0.1", int(port))], prefix=prefix, is_tls=False, ttl=600.0, connect_timeout=20.0,
    read_timeout=40.0, links=(scope, None), **dict.fromkeys(no),
)

def take(kind):
    while True:
        assert client.wait(60.0)
        for event in client.take():
            if isinstance(event, _core.ConnectionLost):
                print("lost", event.kind, flush=True)
                sys.exit()
            if isinstance(event, kind):
                return event

take(_core.Connected)
client.txn(1, [], [("put", "/here/" + name, b"", True)])
take(_core.Reply)
if "held" in sys.argv:
    listener = next(
        fd for fd in range(3, 64)
        if subprocess.os.path.exists(f"/proc/self/fd/{fd}")
        and subprocess.os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        and socket.socket(fileno=subprocess.os.dup(fd)).getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )
    subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], pass_fds=[listener])
print("here", flush=True)
if "close" in sys.argv:
    sys.stdin.read()
    client.close()
else:
    take(())
"""


class Session:
    """A program with a session of its own, and with a key on its lease."""

    def __init__(self, name, etcd, *how):
        endpoint = etcd.server.endpoint.rpartition(":")[2]
        command = [sys.executable, "-c", SESSION, name, etcd.prefix, SCOPE, endpoint, *how]
        self.program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_until_it_is_here(self):
        assert wait_readable(self.program.stdout.fileno(), HANG)
        assert self.program.stdout.readline() == "here\n"

    def kill(self):
        self.program.kill()
        self.program.wait(HANG)

    def close(self):
        self.kill()
        self.program.stdin.close()
        self.program.stdout.close()


@pytest.fixture
def begin(etcd):
    """Start sessions, the oldest first."""
    begun = []

    def begin(*sessions):
        for name, *how in sessions:
            begun.append(Session(name, etcd, *how))
            begun[-1].wait_until_it_is_here()
        wait_until(lambda: etcd.are_linked(SCOPE, len(begun)), bool)
        return begun

    yield begin
    for session in begun:
        session.close()
    reap_adopted()


def here(etcd):
    return {key.removeprefix("/here/") for key, _ in etcd.keys().items() if key.startswith("/here/")}


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_session_is_noticed_whichever_it_is(etcd, begin, victim):
    sessions = begin(("a",), ("b",), ("c",))
    sessions[victim].kill()
    wait_until(lambda: here(etcd), lambda found: found == {"a", "b", "c"} - {"abc"[victim]})


def test_not_before_its_listener_is_let_go(etcd, begin):
    first, _ = begin(("a", "held"), ("b",))
    (_, port), _ = etcd.cards(SCOPE)
    first.kill()
    # What holds it takes calls in the place of the dead.
    with socket.create_connection(("127.0.0.1", port), HANG):
        assert here(etcd) == {"a", "b"}
        first.program.stdin.close()
        wait_until(lambda: here(etcd), lambda found: found == {"b"})


def test_one_that_ends_in_order_is_gone_at_once(etcd, begin):
    first, _ = begin(("a", "close"), ("b",))
    first.program.stdin.close()
    wait_until(lambda: here(etcd), lambda found: found == {"b"})


def test_a_stranger_ends_nobody(etcd, begin):
    begin(("a",), ("b",))
    (lease, _), (_, port) = etcd.cards(SCOPE)
    hello = b"\x93ERSLNK\x01" + int(lease, 16).to_bytes(8, "big") + bytes(16)
    for words in (hello, b"GET / HTTP/1.0\r\n\r\n" + bytes(32), b""):
        # It may be closed before all was said.
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), HANG) as stranger:
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(16) == b""
    assert here(etcd) == {"a", "b"}
