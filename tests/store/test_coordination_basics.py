"""Transactions, watches and leases over loopback."""

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from helpers import procs
from helpers.coordination import RUN, Client, Server, serving

from elasticrs import _core


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def client(server: Server) -> Client:
    return server.client()


@pytest.fixture
def other(server: Server) -> Client:
    return server.client()


def entry(found: _core.Entry) -> tuple[str, bytes, int, int]:
    return found.key, found.value, found.create_revision, found.mod_revision


def test_reads_of_a_transaction_see_its_writes(client):
    reply = client.txn(
        [("missing", "k")],
        [("put", "k", b"1", False), ("get", "k"), ("put", "k", b"2", False), ("range", "", 0)],
    )
    assert (reply.ok, reply.revision) == (True, 1)
    one, first, also_one, (last,) = reply.results
    assert (one, also_one) == (1, 1)
    assert entry(first) == ("k", b"1", 1, 1)
    assert entry(last) == ("k", b"2", 1, 1)


def test_a_transaction_whose_compares_fail_does_the_other_thing(client):
    client.put("k", b"v")
    reply = client.txn(
        [("exists", "k"), ("value", "k", b"w")], [("delete", "k")], [("get", "k"), ("get", "none")]
    )
    assert (reply.ok, reply.revision) == (False, 1)
    assert entry(reply.results[0]) == ("k", b"v", 1, 1)
    assert reply.results[1] is None


@pytest.mark.parametrize(
    ("compare", "holds"),
    [
        (("create", "k", 1), True),
        (("create", "k", 2), False),
        (("create", "none", 0), True),
        (("mod", "k", 2), True),
        (("mod", "k", 1), False),
        (("mod", "none", 0), True),
        (("exists", "none"), False),
        (("missing", "k"), False),
        (("value", "k", b"2"), True),
        (("value", "none", b""), False),
    ],
)
def test_compares(client, compare, holds):
    client.put("k", b"1")
    client.put("k", b"2")
    assert client.txn([compare]).ok is holds


def test_the_predecessor_is_the_one_made_before(client):
    for key in ("n/b", "n/a", "other", "n/c"):
        client.put(key)
    client.put("n/b", b"overwritten")
    found = client.txn(then=[("predecessor", "n/", key) for key in ("n/b", "n/a", "n/c", "none")])
    assert [each and each.key for each in found.results] == [None, "n/b", "n/a", None]


def test_the_lease_ends_with_the_connection(client, other):
    client.txn(then=[("put", f"mine/{n}", b"", n < 3) for n in (1, 2, 3)])
    found = other.watch("mine/", snapshot=True).results
    assert [each.key for each in found] == ["mine/1", "mine/2", "mine/3"]
    client.close()
    assert other.changes() == [("mine/1", None), ("mine/2", None)]


def test_each_revision_comes_whole_and_once_and_before_its_reply(client, other):
    other.watch("a/")
    other.watch("a/b/")
    other.watch("a/b/c", exact=True)
    client.txn(then=[("put", "a/b/c", b"1", False), ("put", "x", b"", False), ("delete", "a/b/c")])
    client.put("a/b/cd", b"2")
    assert other.changes() == [("a/b/c", b"1"), ("a/b/c", None)]
    assert other.changes() == [("a/b/cd", b"2")]
    other.tag += 1
    other.inner.txn(other.tag, [], [("put", "a/x", b"3", False)])
    assert other.next(_core.Changes).revision == 3
    assert other.next(_core.Reply).revision == 3


def test_a_watch_may_begin_in_the_past(client, other):
    for value in (b"1", b"2", b"3"):
        client.put("k", value)
        client.put("x", value)
    assert other.watch("k", from_revision=3).results == []
    assert [other.changes(), other.changes()] == [[("k", b"2")], [("k", b"3")]]
    client.put("k", b"4")
    assert other.changes() == [("k", b"4")]


def test_a_watch_on_what_is_forgotten_names_the_oldest_revision():
    with serving(max_bytes=20_000) as small:
        client = small.client()
        for _ in range(10):
            client.put("k", bytes(1000))
        reply = client.watch("k", from_revision=1)
        assert not reply.ok
        (oldest,) = reply.results
        assert 1 < oldest < 10
        assert client.watch("k", from_revision=oldest).ok
        assert client.changes() == [("k", bytes(1000))]


def test_after_unwatch_nothing_comes(client, other):
    other.watch("k")
    other.inner.unwatch("k")
    other.watch("end")
    client.put("k")
    client.put("end")
    assert other.changes() == [("end", b"")]


def test_a_wait_without_a_limit_sees_a_signal_that_another_thread_took(server: Server) -> None:
    waiting = f"""
        import signal, sys, threading
        from elasticrs import _core

        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
        client = _core.CoordinationClient("127.0.0.1", {server.port}, run_id="{RUN}")
        assert client.wait(None) and client.take()
        # The kernel hands it to the thread that does not block it.
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        print("WAITS", flush=True)
        client.wait(None)
    """
    command = [sys.executable, "-c", textwrap.dedent(waiting)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        procs.wait_state(process.pid, "S")
        process.send_signal(signal.SIGUSR1)
        try:
            assert process.wait(procs.HANG) == 7
        finally:
            process.kill()
