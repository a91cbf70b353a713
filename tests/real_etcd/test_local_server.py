"""`EtcdServer`: an etcd that a program starts for itself, and that exits with the program."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from helpers.etcd import binary
from helpers.procs import HANG, reap_adopted, wait_readable, wait_until
from helpers.said import says

from elasticrs.rendezvous.etcd_server import EtcdServer, find_free_port, stop_etcd


@pytest.fixture
def program(monkeypatch):
    """Use the installed etcd program. Without one, skip the test."""
    if binary() is None:
        pytest.skip("needs etcd, which `make setup` gets where Debian's packages are at hand")
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", binary())


@pytest.fixture
def server(program, tmp_path):
    made = EtcdServer(str(tmp_path / "data"))
    yield made
    made.stop()


def test_etcd_server_starts_stops_and_restarts(server, tmp_path):
    assert server.get_port() == -1
    server.start(stderr=subprocess.DEVNULL)
    assert server.get_endpoint() == f"{server.get_host()}:{server.get_port()}"
    client = server.get_client()
    assert client.version[:2] == "3."
    client.write("/a/b", "x")
    client.set("/a/c/d", "y")
    assert (client.get("/a/b").value, client.get("/a/c/d").value) == ("x", "y")
    client.delete("/a", recursive=True, dir=True)
    with pytest.raises(KeyError, match="/a/b"):
        client.get("/a/b")
    client.close()
    assert (tmp_path / "data").is_dir()
    server.stop()
    server.stop()
    assert not (tmp_path / "data").exists()
    server.start(stderr=subprocess.DEVNULL)
    assert server.get_client().version


KILLED = """
import os, subprocess, sys
from elasticrs.rendezvous.etcd_server import EtcdServer
server = EtcdServer(sys.argv[1])
server.start(stderr=subprocess.DEVNULL)
if os.fork() == 0:
    sys.exit()  # runs what is to be run at exit
os.wait()
server.get_client().version
print(server._etcd_proc.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["exit", "SIGKILL"])
def test_etcd_server_ends_with_its_program(program, tmp_path, how):
    data = tmp_path / "data"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(data)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        keeper = os.pidfd_open(int(running.stdout.readline()))
        if how == "SIGKILL":
            running.kill()
        running.stdin.close()
        running.wait(HANG)
    assert wait_readable(keeper, HANG)
    os.close(keeper)
    assert not data.exists()
    # Reap the keeper, which this process adopted when its parent exited.
    reap_adopted()


def test_etcd_server_ends_with_its_keeper(server):
    server.start(stderr=subprocess.DEVNULL)
    client = server.get_client()
    os.kill(server._etcd_proc.pid, signal.SIGKILL)
    server._etcd_proc.wait(HANG)

    def is_gone():
        try:
            return not client.version
        except OSError:
            return True

    wait_until(is_gone)
    reap_adopted()


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        (None, ("etcd is not in PATH", "apt-get install etcd-server", "TORCHELASTIC_ETCD_BINARY_PATH")),
        ("/no/etcd", ("'/no/etcd' (TORCHELASTIC_ETCD_BINARY_PATH)", "etcd-server")),
    ],
)
def test_etcd_server_without_an_etcd_binary_names_the_package(monkeypatch, tmp_path, given, tokens):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TORCHELASTIC_ETCD_BINARY_PATH", raising=False)
    if given is not None:
        monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", given)
    with pytest.raises(FileNotFoundError) as raised:
        EtcdServer().start()
    says(str(raised.value), *tokens)


def script(tmp_path, text):
    path = tmp_path / "etcd"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_server_that_exits_is_retried_and_then_reported(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", script(tmp_path, "exit 7"))
    with pytest.raises(RuntimeError, match="exit code 7"):
        EtcdServer(str(tmp_path / "data")).start(num_retries=2)
    assert "trying again" in caplog.text
    assert not (tmp_path / "data").exists()


def test_a_server_that_does_not_answer_times_out(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", script(tmp_path, "exec sleep 1000"))
    with pytest.raises(TimeoutError, match=r"etcd was not ready within 0.2 s"):
        EtcdServer(str(tmp_path / "data")).start(timeout=0.2, num_retries=1)


def test_find_free_port_reserves_the_port():
    with find_free_port() as held, find_free_port() as other:
        port = held.getsockname()[1]
        assert port != other.getsockname()[1]
        with socket.socket() as taker:
            taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                taker.bind(("127.0.0.1", port))


GOOD, IPV6 = ((family, socket.SOCK_STREAM, 0, "", ()) for family in (socket.AF_INET, socket.AF_INET6))
UNUSABLE = (socket.AF_INET, socket.SOCK_STREAM, 9999, "", ())  # no such protocol


@pytest.mark.parametrize("addresses", [[IPV6, GOOD], [UNUSABLE, GOOD], [UNUSABLE, IPV6, GOOD]])
def test_find_free_port_tries_all_addresses_of_localhost_ipv4_first(monkeypatch, addresses):
    with monkeypatch.context() as patched:
        # Replace only the list of addresses, because this machine may have a single address.
        patched.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
        held = find_free_port()
    with held:
        assert held.family == socket.AF_INET
        assert held.getsockname()[0] == "127.0.0.1"


def test_find_free_port_fails_without_a_usable_address(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [UNUSABLE] * 2)
    with pytest.raises(RuntimeError, match="Failed to create a socket") as caught:
        find_free_port()
    assert isinstance(caught.value.__cause__, OSError)


def test_stop_etcd_without_a_server_is_no_error(tmp_path):
    stop_etcd(None, str(tmp_path / "none"))
