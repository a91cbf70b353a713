"""A killed agent is detected long before its lease expires, unless processes of it are still running.

The nursery of a killed agent notifies the other sessions. A plain program has no nursery, so only its lease
proves its end.
"""

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.held import held
from helpers.procs import HANG, reap_adopted, wait_readable, wait_until

SCOPE = "job"
SESSION = """
import sys
from elasticrs import _core

name, prefix, scope, port = sys.argv[1:5]
no = ("ca_cert", "cert", "key", "user", "password", "job_lease", "stall_timeout", "supervisor")
options = dict.fromkeys(no)
if "nursery" in sys.argv:
    supervisor = options["supervisor"] = _core.Supervisor()
    worker = _core.ProcessSpec(0, ["/bin/sleep", "inf"], env={})
    supervisor.start(_core.GroupSpec([worker], on_failure=_core.StopPolicy(15, 60.0), linger=0.0))
    while not isinstance(supervisor.next_event(60.0), _core.GroupStarted):
        pass
client = _core.CoordinationClient.etcd(
    [("127.0.0.1", int(port))], prefix=prefix, is_tls=False, ttl=600.0, connect_timeout=20.0,
    read_timeout=40.0, links=(scope, None), **options,
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
client.txn(1, [], [_core.Op.put("/here/" + name, b"", True)])
take(_core.Reply)
print("here", flush=True)
if "close" in sys.argv:
    sys.stdin.read()
    client.close()
else:
    take(())
"""


class Session:
    """A program that opens a session and creates a key with the session's lease."""

    def __init__(self, name, etcd, *how):
        endpoint = etcd.server.endpoint.rpartition(":")[2]
        command = [sys.executable, "-c", SESSION, name, etcd.prefix, SCOPE, endpoint, *how]
        self.program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def nursery(self):
        """Return the pid of the nursery, which is the program's only child."""
        pid = self.program.pid
        tasks = [Path(f"/proc/{pid}/task/{task}/children") for task in os.listdir(f"/proc/{pid}/task")]
        (nursery,) = (int(child) for task in tasks for child in task.read_text().split())
        return nursery

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
    """Return a function that starts sessions, in the given order, and waits until those with a nursery are
    linked.
    """
    begun = []

    def begin(*sessions):
        for name, *how in sessions:
            begun.append(Session(name, etcd, *how))
            begun[-1].wait_until_it_is_here()
        count = sum("nursery" in how for _, *how in sessions)
        wait_until(lambda: etcd.are_linked(SCOPE, count, is_held=True), bool)
        return begun

    yield begin
    for session in begun:
        session.close()
    reap_adopted()


PIDFD_GETFD = 438


def cut(pid):
    """Shut down all listening sockets of a process, then all connections at their ports. Return the ports."""
    ports = set()
    for is_listener in (True, False):
        for one in sockets_of(pid):
            with one:
                is_internet = one.family in (socket.AF_INET, socket.AF_INET6)
                listens = is_internet and bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                if not is_internet or listens != is_listener:
                    continue
                port = one.getsockname()[1]
                if is_listener:
                    ports.add(port)
                if port in ports:
                    # Ignore connections that the peer has closed.
                    with contextlib.suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)
    return ports


def sockets_of(pid):
    """Yield duplicates of the sockets of another process."""
    process = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            fd = ctypes.CDLL(None).syscall(PIDFD_GETFD, process, int(name), 0)
            # Skip descriptors that the process has closed since they were listed.
            if fd >= 0 and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                yield socket.socket(fileno=fd)
            elif fd >= 0:
                os.close(fd)
    finally:
        os.close(process)


def here(etcd):
    return {key.removeprefix("/here/") for key, _ in etcd.keys().items() if key.startswith("/here/")}


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_any_killed_agent_is_removed_before_its_lease_expires(etcd, begin, victim):
    sessions = begin(("a", "nursery"), ("b", "nursery"), ("c", "nursery"))
    sessions[victim].kill()
    wait_until(lambda: here(etcd), lambda found: found == {"a", "b", "c"} - {"abc"[victim]})


def test_a_killed_agent_stays_in_etcd_until_its_nursery_finishes(etcd, begin):
    first, _, third = begin(("a", "nursery"), ("b", "nursery"), ("c", "nursery"))
    nursery = first.nursery()
    # Hold the nursery with ptrace, because a nursery that SIGSTOP stopped would be resumed when its agent
    # dies.
    with held(nursery):
        first.kill()
        third.kill()
        wait_until(lambda: here(etcd), lambda found: "c" not in found)
        assert here(etcd) == {"a", "b"}
    wait_until(lambda: here(etcd), lambda found: found == {"b"})


@pytest.mark.parametrize("options", [("nursery",), ()], ids=["links are cut", "no links"])
def test_a_live_session_that_accepts_no_connections_is_not_ended(etcd, begin, options):
    first, _, third = begin(("a", *options), ("b", "nursery"), ("c", "nursery"))
    # Cut the links of the first session, and make it refuse further connections, as a firewall does.
    cut_ports = cut(first.program.pid)
    assert len(cut_ports) == len(options)
    for port in cut_ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), HANG)
    third.kill()
    wait_until(lambda: here(etcd), lambda found: "c" not in found)
    assert here(etcd) == {"a", "b"}
    assert first.program.poll() is None


def test_a_killed_program_without_a_nursery_stays_until_its_lease_expires(etcd, begin):
    first, second, third = begin(("a",), ("b", "nursery"), ("c", "nursery"))
    first.kill()
    third.kill()
    wait_until(lambda: here(etcd), lambda found: "c" not in found)
    assert here(etcd) == {"a", "b"}
    assert len(etcd.cards(SCOPE)) == 1
    assert second.program.poll() is None


def test_a_program_that_closes_its_session_is_removed_at_once(etcd, begin):
    first, _ = begin(("a", "close"), ("b",))
    first.program.stdin.close()
    wait_until(lambda: here(etcd), lambda found: found == {"b"})


def test_a_foreign_connection_to_a_link_port_ends_no_session(etcd, begin):
    begin(("a", "nursery"), ("b", "nursery"))
    (lease, _), (_, port) = etcd.cards(SCOPE)
    hello = b"\x93ERSLNK\x01" + int(lease, 16).to_bytes(8, "big") + bytes(16)
    for words in (hello, b"GET / HTTP/1.0\r\n\r\n" + bytes(32), b""):
        # Ignore errors, because the session may close the connection before everything is sent.
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), HANG) as stranger:
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(16) == b""
    assert here(etcd) == {"a", "b"}
