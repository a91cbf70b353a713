"""Transactions, watches and leases over loopback."""

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from helpers import procs
from helpers.coordination import RUN, Client, Server, serving
from helpers.store_contract import StoreContract

from elasticrs import _core
from elasticrs._core import Compare, Op


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


class TestContract(StoreContract):
    """The common tests of a coordination store, run with the store of elasticrs."""


def entry(found: _core.Entry) -> tuple[str, bytes, int, int]:
    return found.key, found.value, found.create_revision, found.mod_revision


def test_a_transaction_may_write_a_key_twice(client):
    reply = client.txn(
        [Compare.missing("k")],
        [Op.put("k", b"1", False), Op.get("k"), Op.put("k", b"2", False), Op.range("", 0)],
    )
    assert (reply.ok, reply.revision) == (True, 1)
    one, first, also_one, (last,) = reply.results
    assert (one, also_one) == (1, 1)
    assert entry(first) == ("k", b"1", 1, 1)
    assert entry(last) == ("k", b"2", 1, 1)


def test_changes_of_a_revision_arrive_in_order_and_before_its_reply(client, other):
    other.watch("a/")
    other.watch("a/b/")
    other.watch("a/b/c", exact=True)
    client.txn(then=[Op.put("a/b/c", b"1", False), Op.put("x", b"", False), Op.delete("a/b/c")])
    client.put("a/b/cd", b"2")
    assert other.changes() == [("a/b/c", b"1"), ("a/b/c", None)]
    assert other.changes() == [("a/b/cd", b"2")]
    other.tag += 1
    other.inner.txn(other.tag, [], [Op.put("a/x", b"3", False)])
    assert other.next(_core.Changes).revision == 3
    assert other.next(_core.Reply).revision == 3


def test_a_wait_without_a_limit_handles_a_signal_taken_by_another_thread(server: Server) -> None:
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
