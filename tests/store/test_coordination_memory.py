"""The data of all clients of a store stay within a common limit, and freed memory is returned to
the system.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.coordination import RUN, Client, RawClient, get, put, serving, store_command, transaction
from helpers.procs import wait_until

from elasticrs._core import Op

LIMIT_MIB = 16
# Code, stacks, memory that the allocator keeps, and the request that is being handled.
SLACK_MIB = 24
REQUEST = 1 << 20
# By default, glibc adapts these limits and may then keep as much freed memory as the store has in use. With
# fixed limits, the tests measure the memory that the store itself holds.
FIXED_LIMITS_OF_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}


class Store:
    """``python -m elasticrs.store`` in a separate process, so that memory measurements include
    nothing else.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self.port = int(process.stdout.readline().rsplit(":", 1)[1])
        self.client = Client(self.port, interval=60.0).connected()
        self.client.put("first", b"")
        self.base = self.mib("VmRSS")

    def mib(self, field: str) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) / 1024

    def gives_memory_back(self) -> None:
        def used() -> float:
            self.client.put("still", b"served")
            return self.mib("VmRSS")

        wait_until(used, lambda now: now <= self.base + LIMIT_MIB / 2)


@pytest.fixture
def store() -> Iterator[Store]:
    command = store_command("--run-id", RUN, "--max-mib", LIMIT_MIB)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    env = {**os.environ, **FIXED_LIMITS_OF_MALLOC}
    with subprocess.Popen(command, **streams, text=True, env=env) as process:
        store = Store(process)
        yield store
        store.client.close()
        process.terminate()


def send(client: RawClient, data: bytes) -> None:
    """Send data. The store may close the connection meanwhile."""
    with contextlib.suppress(ConnectionError):
        client.socket.sendall(data)


def put_of(size: int) -> bytes:
    """Return a request of ``size`` bytes, preceded by its length."""
    length = 4
    value = size + length - len(transaction(put("k")))
    return transaction(put("k", bytes(value)))


@pytest.mark.parametrize(
    ("count", "sent", "options"),
    [(150, put_of(REQUEST)[:-1], {}), (30, 30 * transaction(get("large")), {"receive_buffer": 4096})],
    ids=["requests that never end", "unread answers"],
)
def test_client_data_stay_within_the_memory_limit(store, count, sent, options):
    store.client.put("large", bytes(REQUEST // 2))
    clients = [RawClient(store.port, **options).connected() for _ in range(count)]
    for client in clients:
        send(client, sent)
    # A client that uses almost no memory is served nevertheless.
    store.client.put("k", b"v")
    assert store.mib("VmHWM") < store.base + LIMIT_MIB + SLACK_MIB
    for client in clients:
        client.close()
    store.gives_memory_back()


def test_an_incomplete_request_times_out():
    with serving(request_timeout=0.2) as store:
        whole = store.client()
        client = store.raw().connected()
        send(client, put_of(1000)[:500])
        assert "0.2 s" in client.refusal("timeout")
        client.close()
        # A client that has not started a request has no deadline.
        whole.put("k", b"v")
        whole.close()


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_an_invalid_request_timeout_is_refused(timeout):
    with pytest.raises(ValueError, match="request_timeout"), serving(request_timeout=timeout):
        pass


def test_watches_count_as_memory_and_the_largest_client_is_disconnected():
    with serving(max_bytes=1 << 20) as store:
        small = store.client()
        small.watch("k")
        first, second = (store.client() for _ in range(2))
        for number in range(500):
            first.watch(f"{number:01000}")
        for number in range(500):
            second.watch(f"{number:01000}")
        assert first.lost().kind == "limit"
        small.put("k", b"v")
        assert small.changes() == [("k", b"v")]


def test_connections_count_as_memory_and_unknown_peers_end_no_session():
    with serving(max_bytes=40_000) as store:
        first = store.client()
        clients = [store.raw() for _ in range(40)]
        refused = 0
        for client in clients:
            with contextlib.suppress(ConnectionError, AssertionError):
                client.connected()
                continue
            refused += 1
        assert 0 < refused < 40
        first.put("k", bytes(500))


def test_stored_values_leave_memory_for_requests_in_transit():
    with serving(max_bytes=1_000_000) as store:
        client = store.client()
        client.put("a", bytes(590_000))
        client.inner.txn(2, [], [Op.put("b", bytes(20_000), False)])
        lost = client.lost()
        assert (lost.kind, "full" in lost.message) == ("limit", True), lost


ROOT = Path(__file__).resolve().parents[2]

MEASURE = """
import json, sys
from benchmarks.scale import job, tables
figures = {n: job.measure(n, 2, idle=0.0) for n in (10, 50)}
drawn, table = tables.picture(figures, {}), tables.markdown(figures, {})
json.dump({"figures": figures, "picture": drawn, "table": table}, sys.stdout)
"""


def test_messages_per_agent_do_not_grow_from_10_to_50_agents():
    # The program waits for all agents at each stage. That it finishes shows that all of them started, learned
    # of the failure, restarted, saw an agent and the leader die, and left after success.
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=ROOT, stdout=subprocess.PIPE, timeout=50, check=True, text=True
    )
    measured = json.loads(done.stdout)
    few, many = measured["figures"]["10"], measured["figures"]["50"]
    assert many["form: up"] <= 7
    assert many["form: down"] <= 11
    assert many["restart: up"] <= 2
    assert many["restart: down"] <= 7
    for way in ("up", "down"):
        # On a busy machine, messages are batched differently. A cost that grew with the number of agents
        # would be about 40 higher.
        assert many[f"form: {way}"] <= few[f"form: {way}"] + 1.5
        assert many[f"restart: {way}"] <= few[f"restart: {way}"] + 1.5
    for way in ("sent", "received"):
        # Allow a small difference. With more agents, keys have more digits and messages are batched
        # differently.
        assert many[f"restart: {way}"] <= few[f"restart: {way}"] * 1.1

    texts = {each.text for each in ElementTree.fromstring(measured["picture"]).iter()}
    assert {"last join", "all have it", "leader", "store", "all others", "restart, sent"} <= texts
    assert "| a worker fails → all agents have it |" in measured["table"]
