"""Hostile clients of the stores. Meanwhile, an agent keeps its session, and new agents can connect."""

import contextlib
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from helpers import procs
from helpers.coordination import MAGIC, Client
from helpers.torch_clients import GREETING

from elasticrs import _core
from elasticrs._core import Op

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKEN = b"secret"
LEASE = {"token": TOKEN, "interval": 0.5, "attempts": 5, "resume": False}
"""Session parameters of an agent that gives up on the store after 2.5 s without an answer."""

SERVE = f"""
import sys
from elasticrs import _core
_core.raise_descriptor_limit()
store = _core.CoordinationServer([("127.0.0.1", 0)], run_id=None, token={TOKEN!r})
workers = _core.WorkerStore("127.0.0.1")
workers.serve()
print(store.port, workers.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def stores() -> Iterator[tuple[int, int]]:
    """Serve the coordination store and a workers' store in another process. Yield their ports."""
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        store, workers = map(int, process.stdout.readline().split())
        yield store, workers
        process.communicate()
    assert process.returncode == 0


@pytest.fixture
def agent(stores: tuple[int, int]) -> Iterator[Client]:
    client = Client(stores[0], **LEASE).connected()
    yield client
    client.close()


def assert_is_served(agent: Client, during: threading.Thread) -> None:
    """Assert that the store answers an agent while a thread runs, and that the agent keeps its session."""
    while during.is_alive():
        agent.txn(then=[Op.get("k")])
    agent.put("k", b"v")


def attacking(attack, *args) -> threading.Thread:
    thread = threading.Thread(target=attack, args=args)
    thread.start()
    return thread


def test_a_scoped_client_with_long_searches(stores, agent):
    port, _ = stores
    scope = "/own/"
    # The store reads a client's keep-alives after its searches, so a short lease would end during them.
    scoped = {"token": _core.scoped_token(TOKEN, scope).encode(), "scope": scope, "interval": 30.0}
    filling = Client(port, **scoped).connected()
    count = 50_000
    for part in ("b", "k", "a"):
        names = ["/own/k"] if part == "k" else [f"/own/{part}/{number}" for number in range(count)]
        for first in range(0, len(names), 4000):
            filling.txn(then=[Op.put(name, b"", False) for name in names[first : first + 4000]])
    filling.close()
    # Each search of these scoped clients visits 50,000 keys.
    crowd = [Client(port, **scoped).connected() for _ in range(20)]

    def attack() -> None:
        for each in crowd:
            for tag in range(60):
                each.inner.txn(tag, [], [Op.predecessor("/own/a/", "/own/k")] * 5)
        for each in crowd:
            answered = 0
            while answered < 60:
                each.inner.wait(procs.HANG)
                events = each.inner.take()
                assert not any(isinstance(event, _core.ConnectionLost) for event in events), events
                answered += sum(isinstance(event, _core.Reply) for event in events)

    assert_is_served(agent, attacking(attack))
    for each in crowd:
        each.close()


def test_a_flood_of_requests_to_the_workers_store(stores, agent):
    _, port = stores
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(GREETING)
        for first in range(0, 500_000, 50_000):
            keys = b"".join(
                struct.pack("<Q", 7) + b"%07d" % n + bytes(8) for n in range(first, first + 50_000)
            )
            sock.sendall(b"\x0b" + struct.pack("<Q", 50_000) + keys)
        sock.sendall(b"\x07")
        assert int.from_bytes(sock.recv(8, socket.MSG_WAITALL), "little") == 500_000

    def attack() -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(500):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                # Request a list of all keys, and never read the reply.
                sock.sendall(GREETING + b"\x11")
            last = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=procs.HANG))
            last.sendall(GREETING + b"\x07")
            last.recv(8, socket.MSG_WAITALL)

    assert_is_served(agent, attacking(attack))


def test_silent_connections_take_no_places_of_agents(stores, agent):
    port, _ = stores
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(16_384, hard - 200)
    try:
        with contextlib.ExitStack() as crowd:
            for number in range(count):
                where = (("127.0.0.1", port), procs.HANG, (f"127.0.0.{1 + number % 4}", 0))
                crowd.enter_context(socket.create_connection(*where)).sendall(MAGIC)
            begun = time.monotonic()
            late = Client(port, **LEASE).connected()
            assert time.monotonic() - begun < 5
            late.close()
            agent.put("k", b"v")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
