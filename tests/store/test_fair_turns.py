"""Fairness of the stores: a single client, or one kind of clients, does not prevent a store from answering
other clients.
"""

import contextlib
import fcntl
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest
from helpers import procs
from helpers.coordination import MAGIC, REPLY, Client, RawClient, serving, text, transaction
from helpers.held import held, thread_of
from helpers.torch_clients import GREETING

from elasticrs._core import Op

KEYS = 2000
SEARCHES = 25
"""Number of searches in a transaction. Each search visits :data:`KEYS` keys."""
FLOOD = 60
"""Number of transactions that a client sends at once. The store reads all of them with one system call."""

SERVE = """
import sys
from elasticrs import _core
store = _core.CoordinationServer([("127.0.0.1", 0)], run_id=None)
workers = _core.WorkerStore("127.0.0.1")
workers.serve()
print(store.port, workers.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def stores() -> Iterator[tuple[int, int, int]]:
    """Serve the coordination store and a workers' store in another process. Yield its pid and both ports."""
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        store, workers = map(int, process.stdout.readline().split())
        yield process.pid, store, workers
        process.communicate()
    assert process.returncode == 0


def predecessor(prefix: str, key: str) -> bytes:
    """Return a transaction's operation that searches for the predecessor of a key."""
    return b"\5" + text(prefix) + text(key)


LONG_SEARCHES = transaction(*[predecessor("a/", "k")] * SEARCHES)


def unread(client: RawClient) -> int:
    """Return the number of bytes that the client has received but not read yet."""
    return struct.unpack("i", fcntl.ioctl(client.socket.fileno(), termios.FIONREAD, bytes(4)))[0]


def fill(client: Client) -> None:
    """Write keys that make a search slow. The search for the predecessor of ``k`` below ``a/`` visits
    :data:`KEYS` keys.
    """
    for names in (
        [f"b/{number}" for number in range(KEYS)],
        ["k"],
        [f"a/{number}" for number in range(KEYS)],
    ):
        client.txn(then=[Op.put(name, b"", False) for name in names])


@pytest.mark.parametrize("greedy", [1, FLOOD], ids=["one client", "many clients"])
def test_clients_with_long_searches_delay_no_other_client(stores, greedy):
    pid, port, _ = stores
    client, crowd = Client(port).connected(), [RawClient(port).connected() for _ in range(greedy)]
    fill(client)
    crowd[0].socket.sendall(LONG_SEARCHES)
    answer = 5 + len(crowd[0].until(REPLY))
    with held(thread_of(pid, "elasticrs-store")):
        for each in crowd:
            each.socket.sendall(FLOOD // greedy * LONG_SEARCHES)
        client.inner.txn(99, [], [Op.get("k")])
    client.tag = 99
    client.reply()
    # When the other client has its answer, the greedy clients have received less than half of their answers.
    assert sum(map(unread, crowd)) < FLOOD * answer / 2
    for each in crowd:
        for _ in range(FLOOD // greedy):
            each.until(REPLY)
        each.close()
    client.close()


def test_the_workers_store_does_not_delay_the_coordination_store(stores):
    pid, port, workers = stores
    client = Client(port).connected()
    with socket.create_connection(("127.0.0.1", workers)) as worker:
        worker.sendall(GREETING + b"\x07")
        assert worker.recv(8, socket.MSG_WAITALL) == bytes(8)
        # Pause the thread that serves workers, to simulate a busy thread.
        with held(thread_of(pid, "elasticrs-ranks")):
            worker.sendall(b"\x11")
            assert client.put("k", b"v") == 1
        assert worker.recv(8, socket.MSG_WAITALL) == bytes(8)
    client.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_strangers_that_only_connect_keep_no_client_out(host):
    token = {"token": b"secret"}
    with serving(**token, max_connections=64) as store, contextlib.ExitStack() as crowd:
        present = store.client(**token)
        for _ in range(200):
            address = (("127.0.0.1", store.port), procs.HANG, (host, 0))
            crowd.enter_context(socket.create_connection(*address)).sendall(MAGIC)
        # The store still accepts clients, although more strangers than its connection limit are connected.
        late = [store.client(**token) for _ in range(8)]
        present.put("k", b"v")
        for client in late:
            assert client.txn(then=[Op.get("k")]).results[0].value == b"v"
