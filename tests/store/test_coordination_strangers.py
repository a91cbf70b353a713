"""Foreign peers are recognised, and do not affect other sessions."""

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from helpers.coordination import MAGIC, REPLY, RUN, Client, Server, put, serving, transaction
from helpers.peers import peer
from helpers.said import says

from elasticrs import _core
from elasticrs._core import Compare, Op


@contextlib.contextmanager
def answering(answer: bytes | None, *, is_closed: bool = True) -> Iterator[int]:
    """A server that replies to the first bytes with ``answer``, or not at all if it is ``None``."""
    ended = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        if answer is not None:
            connection.sendall(answer)
        if not is_closed:
            ended.wait()

    with peer(serve) as (_, port):
        try:
            yield port
        finally:
            ended.set()


def refused(port: int, kind: str, *tokens: str, **options: object) -> None:
    """Check that a client is refused for this reason, with a line that contains these texts."""
    client = Client(port, **options)
    found = client.lost()
    client.close()
    assert (found.kind, "\n" in found.message) == (kind, False), found.message
    says(found.message, *tokens)


@pytest.mark.parametrize(
    ("server", "client", "kind", "text"),
    [
        ({"token": b"a"}, {"token": b"b"}, "token", "differs"),
        ({"token": b"a"}, {}, "token", "requires a token"),
        ({}, {"token": b"b"}, "token", "no token"),
        ({}, {"run_id": "B"}, "run", f"run {RUN}"),
        ({"max_connections": 0}, {}, "limit", "0 connections"),
    ],
)
def test_a_refused_client_gets_the_reason(server, client, kind, text):
    with serving(**server) as store:
        refused(store.port, kind, text, **client)


TOKEN = b"secret"
SCOPE = "/own/"
SCOPED = {"token": _core.scoped_token(TOKEN, SCOPE).encode(), "scope": SCOPE}


def test_a_scoped_token_gives_access_to_the_keys_of_its_scope():
    with serving(token=TOKEN) as store:
        agent, worker = store.client(token=TOKEN), store.client(**SCOPED)
        agent.put("/own/a", b"1")
        assert worker.watch(SCOPE, snapshot=True).ok
        assert worker.txn(then=[Op.get("/own/a")]).results[0].value == b"1"
        worker.put("/own/b", b"2")
        assert worker.changes() == [("/own/b", b"2")]


@pytest.mark.parametrize(
    "reach",
    [
        lambda client: client.txn(then=[Op.get("/other/a")]),
        lambda client: client.txn(then=[Op.put("/other/a", b"", False)]),
        lambda client: client.txn(compares=[Compare.exists("/other/a")]),
        lambda client: client.txn(otherwise=[Op.delete_prefix("/")]),
        lambda client: client.watch("/"),
    ],
)
def test_a_scoped_session_ends_on_access_outside_its_scope(reach):
    with serving(token=TOKEN) as store:
        agent, worker = store.client(token=TOKEN), store.client(**SCOPED)
        agent.put("/other/a", b"1")
        with pytest.raises(AssertionError, match=r"ConnectionLost: .*allow"):
            reach(worker)
        assert agent.txn(then=[Op.get("/other/a")]).results[0].value == b"1"


@pytest.mark.parametrize(
    "client", [{"token": SCOPED["token"]}, {**SCOPED, "scope": "/"}, {**SCOPED, "scope": "/own"}]
)
def test_a_scoped_token_is_refused_for_any_other_scope(client):
    with serving(token=TOKEN) as store:
        refused(store.port, "token", **client)


def test_a_store_without_a_run_id_serves_any_run():
    with serving(run_id=None) as store:
        clients = [store.client(run_id=run) for run in ("A", "B")]
        clients[0].put("k", b"v")
        assert clients[1].txn(then=[Op.get("k")]).results[0].value == b"v"


def test_a_version_mismatch_error_names_both_versions():
    with serving() as store:
        client = store.raw()
        client.hello(major=7)
        says(client.refusal("version"), "version 4", "version 7")


@pytest.mark.parametrize(
    ("answer", "is_closed", "kind", "token"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", True, "not_ours", "HTTP"),
        (b"SSH-2.0-OpenSSH\r\n", False, "not_ours", "protocol"),
        (b"", True, "closed", "handshake"),
        (MAGIC, True, "closed", "closed"),
        (MAGIC + b"\x01\x00\x00\x00\xff", False, "protocol", "unknown"),
        (MAGIC + b"\xff\xff\xff\xff", False, "protocol", "4294967295"),
        (None, False, "timeout", "0.2 s"),
    ],
)
def test_another_program_on_the_port_is_recognised(answer, is_closed, kind, token):
    with answering(answer, is_closed=is_closed) as port:
        texts = (f"port {port}", "another program") if kind == "not_ours" else ()
        refused(port, kind, *texts, token, connect_timeout=0.2 if answer is None else 30.0)


@pytest.mark.torch
@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_torch_tcpstore_is_recognised_as_another_program(fork, use_libuv):
    (server,) = fork(1)
    server.ask("connect", 0, {"is_master": True, "wait_for_workers": False, "use_libuv": use_libuv})
    refused(server.ask("port"), "not_ours", "TCPStore")


def test_a_refused_connection_is_reported_with_the_endpoint():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    refused(port, "refused", f"127.0.0.1:{port}", "connection refused")


def test_an_unresolvable_host_name_is_reported():
    refused(29400, "resolve", "`no-such-host.invalid`", host="no-such-host.invalid")


def knock(store: Server, sent: bytes) -> None:
    """Connect to the store, send these bytes, and wait until the store closes the connection."""
    with socket.create_connection(("127.0.0.1", store.port), timeout=30) as stranger:
        stranger.sendall(sent)
        while stranger.recv(4096):
            pass


@pytest.mark.parametrize(
    ("sent", "notice"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "HTTP"),
        (b"\x00\xce\xf7\x85\x3c\x00", "TCPStore"),
        (b"\x16\x03\x01\x02", "TLS"),
        (MAGIC[:4] + b"????", "protocol"),
        (MAGIC + b"\xff\xff\xff\x7f", "2147483647 bytes"),
        (MAGIC + b"\x00\x00\x00\x00", "0 bytes"),
        (MAGIC + b"\x01\x00\x00\x00\x06", "hello"),
        (MAGIC + b"\x05\x00\x00\x00\x01\x04\x00\x00\x00", "frame"),
    ],
)
def test_each_unknown_peer_is_disconnected_with_one_notice(sent, notice):
    with serving() as store:
        client = store.client()
        knock(store, sent)
        (line,) = store.inner.take_notices()
        assert notice in line
        client.put("still", b"there")


def test_a_peer_that_sends_only_the_client_greeting_causes_no_notice():
    # A client sends only these bytes if the store is stopped for a while.
    with serving() as store:
        knock(store, b"\x00\xce\xf7\x85\x3c\x07")
        assert store.inner.take_notices() == []


def test_a_refused_client_that_keeps_sending_is_disconnected():
    with serving() as store:
        client = store.raw().connected()
        client.send(0x77, b"")
        client.refusal("protocol")
        # More data than the socket buffers and the store take together.
        much = bytes(64 << 20)
        with pytest.raises(ConnectionError):
            client.socket.sendall(much)


def test_a_supervisor_reports_unknown_peers_as_events():
    supervisor = _core.Supervisor()
    server = _core.CoordinationServer([("127.0.0.1", 0)], run_id=None, supervisor=supervisor)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            event = supervisor.next_event(timeout=30)
        assert isinstance(event, _core.Degraded)
        assert "HTTP" in event.message
        assert server.take_notices() == []
    finally:
        server.close()
        supervisor.close()


def test_notices_about_unknown_peers_are_rate_limited():
    with serving() as store:
        for _ in range(30):
            knock(store, b"GET / HTTP/1.1\r\n\r\n")
        # The store reports ten strangers in ten seconds. On a slow machine, the test may last for two such
        # periods.
        assert 10 <= len(store.inner.take_notices()) < 30


def test_garbage_in_a_session_ends_that_session_only():
    with serving() as store:
        client = store.client()
        client.watch("")
        rude = store.raw().connected()
        rude.socket.sendall(transaction(put("rude", leased=True)))
        assert rude.until(REPLY)
        assert client.changes() == [("rude", b"")]
        rude.send(0x77, os.urandom(100))
        rude.refusal("protocol")
        assert client.changes() == [("rude", None)]


def test_a_request_that_is_too_large_or_malformed_is_not_sent():
    with serving() as store:
        client = store.client()
        with pytest.raises(ValueError, match="1048576"):
            client.inner.txn(1, [], [Op.put("k", bytes(1 << 20), False)])
        with pytest.raises(ValueError, match="at most 1024 bytes"):
            client.inner.txn(1, [], [Op.put("k" * 1025, b"", False)])
        with pytest.raises(TypeError):
            client.inner.txn(1, [], [("put", "k", b"", False)])
        with pytest.raises(TypeError):
            client.inner.txn(1, [], [Compare.exists("k")])
        assert client.put("k", bytes((1 << 20) - 100)) == 1


def test_a_store_can_be_served_over_ipv6():
    with serving(host="::1") as store:
        client = Client(store.port, host="::1")
        assert client.next(_core.Connected).local_address == "::1"
        client.close()


def test_a_store_with_an_empty_host_listens_on_all_interfaces():
    with serving(host="") as store:
        for host in ("127.0.0.1", "::1", "localhost"):
            store.client(host=host)


def test_a_port_in_use_raises_an_error_that_names_the_port():
    with (
        serving() as store,
        pytest.raises(OSError, match=f"127.0.0.1:{store.port}: {os.strerror(errno.EADDRINUSE)}"),
    ):
        _core.CoordinationServer([("127.0.0.1", store.port)], run_id=None)
