"""The store object: torch's names and semantics, use by several threads, and the program that
serves a store.
"""

import datetime
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers import procs
from helpers.coordination import RUN, serving
from helpers.etcd import Etcd
from helpers.etcd_fixtures import site
from helpers.procs import run_program

from elasticrs import _core
from elasticrs._engine.nodes.transport.etcd_site import EtcdSite
from elasticrs._engine.nodes.transport.store import connected
from elasticrs.store import DistNetworkError, DistStoreError, QueueEmptyError, connect

SOON = datetime.timedelta(milliseconds=50)


class Holder:
    """Two stores that the fixture can release. pytest keeps the value of a fixture for longer than the leak
    guard waits.
    """

    def __init__(self, client: Callable[[], Any]) -> None:
        self.client = client
        self.stores = [connected(client(), "p/") for _ in range(2)]

    def close(self) -> None:
        for store in self.stores:
            store.close()
        del self.stores


@pytest.fixture
def pair(either_store: Etcd | None) -> Iterator[Holder]:
    """Two store objects that share one store."""
    with serving() as server:
        if either_store is not None:
            etcd = EtcdSite(tuple(either_store.endpoints), prefix=site(either_store).prefix, ttl=60)
            holder = Holder(partial(etcd.client, "job", connect_timeout=procs.HANG))
        else:
            options = {"run_id": RUN, "stall_timeout": None}
            holder = Holder(partial(_core.CoordinationClient, "127.0.0.1", server.port, **options))
        yield holder
        holder.close()


def everything(store: Any, reader: Any) -> list[Any]:
    """Return the results of all calls. They must be the same for this store and for torch's."""
    store.set("text", "abc")
    seen = [store.get("text"), store.add("n", 5), reader.add("n", -7), reader.get("n")]
    seen += [
        store.compare_set("c", "", "v"),
        reader.compare_set("c", "v", "w"),
        store.compare_set("c", "x", "y"),
    ]
    seen += [store.compare_set("none", "x", "y"), store.check(["c", "n"]), store.check(["none"])]
    store.append("a", "x")
    reader.append("a", "y")
    store.multi_set(["m1", "m2"], ["1", "2"])
    reader.wait(["m1", "m2"], datetime.timedelta(seconds=30))
    seen += [reader.multi_get(["a", "m2", "m1"]), store.delete_key("a"), store.delete_key("a")]
    store.queue_push("q", "first")
    reader.queue_push("q", "second")
    reader.wait(["q"], datetime.timedelta(seconds=30))
    seen += [store.queue_len("q"), store.check(["q"]), reader.queue_pop("q"), store.queue_pop("q", False)]
    seen += [reader.queue_len("q"), store.check(["q"]), store.barrier("b", 1)]
    seen += [store.has_extended_api(), store.timeout]
    return seen


def test_store_calls_return_the_same_values_as_in_torch(pair):
    one, other = pair.stores
    seen = everything(one, other)
    assert seen[:4] == [b"abc", 5, -2, b"-2"]
    assert seen[4:10] == [b"v", b"w", b"w", b"x", True, False]
    assert seen[10:13] == [[b"xy", b"2", b"1"], True, False]
    assert seen[13:20] == [2, True, b"first", b"second", 0, False, None]
    assert seen[20:] == [True, datetime.timedelta(seconds=300)]
    assert [key for key in one.list_keys() if not key.startswith("b/")] == ["c", "m1", "m2", "n", "text"]
    assert one.num_keys() == len(one.list_keys())


@pytest.mark.torch
def test_torch_tcpstore_returns_the_same_values(pair, torch_programs):
    script = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent.parent), *sys.path]}\n"
        "import datetime, torch.distributed as dist\n"
        "from store.test_coordination_object import everything\n"
        "made = {'world_size': None, 'timeout': datetime.timedelta(seconds=300)}\n"
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True, **made)\n"
        "print(everything(store, dist.TCPStore('127.0.0.1', store.port, **made)), flush=True)\n"
        "from elasticrs.store import Store\n"
        "assert not [name for name in dir(dist.Store) if name[0] != '_' and not hasattr(Store, name)]\n"
    )
    assert torch_programs.checked(script) == f"{everything(*pair.stores)}\n"


def test_waiting_for_a_missing_key_raises_the_error_of_torch(pair):
    store = pair.stores[0]
    store.set_timeout(SOON)
    with pytest.raises(DistStoreError, match=r"^wait timeout after 50ms, keys: x$"):
        store.get("x")
    with pytest.raises(DistStoreError, match=r"^wait timeout after 1ms, keys: x, y$"):
        store.wait(["x", "y"], datetime.timedelta(milliseconds=1))
    store.set("word", "w")
    with pytest.raises(ValueError, match="invalid literal"):
        store.add("word", 1)
    assert store.get("word") == b"w"


def test_a_queue_gives_each_value_to_one_client_and_raises_torch_errors(pair):
    one, other = pair.stores
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(store.queue_pop, "q") for store in (one, other, one.clone(), other.clone())]
        for number in range(4):
            one.queue_push("q", str(number))
        assert sorted(each.result(procs.HANG) for each in waiting) == [b"0", b"1", b"2", b"3"]
    with pytest.raises(QueueEmptyError, match=r"^queue is empty$"):
        one.queue_pop("q", block=False)
    one.set_timeout(SOON)
    with pytest.raises(DistStoreError, match=r"^wait timeout after 50ms, keys: q$"):
        one.queue_pop("q")
    one.queue_push("q", b"")
    assert (one.queue_len("q"), one.queue_pop("q")) == (1, b"")
    for value in ("", "no queue at all"):
        one.set("word", value)
        with pytest.raises(ValueError, match="not a queue"):
            one.queue_len("word")


def test_a_barrier_waits_for_all_participants_and_can_be_reused(pair):
    one, other = pair.stores
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            first = pool.submit(one.barrier, "b", 2)
            other.wait(["b/come"])
            other.barrier("b", 2)
            assert first.result(procs.HANG) is None
    with pytest.raises(DistStoreError, match=r"^barrier timeout after 50ms, key: c$"):
        one.barrier("c", 2, SOON)


def test_a_waiting_client_is_woken_by_the_last_missing_key(pair):
    one, other = pair.stores
    with ThreadPoolExecutor(3) as pool:
        waits = [
            pool.submit(one.wait, ["a", "b"]),
            pool.submit(one.get, "b"),
            pool.submit(one.clone().get, "a"),
        ]
        other.set("a", "1")
        assert waits[2].result(procs.HANG) == b"1"
        assert not waits[0].done()
        other.set("b", "2")
        assert waits[0].result(procs.HANG) is None
        assert waits[1].result(procs.HANG) == b"2"


def test_stores_with_different_prefixes_have_separate_keys(pair):
    store = pair.stores[0]
    inner = store.with_prefix("q/")
    inner.set("k", "inner")
    store.set("k", "outer")
    assert (inner.get("k"), store.get("k"), store.get("q/k")) == (b"inner", b"outer", b"inner")
    whole = connected(pair.client())
    assert whole.get("p/q/k") == b"inner"
    whole.close()


def test_concurrent_adds_and_appends_lose_no_update(pair):
    start = threading.Barrier(8)

    def count(number: int) -> None:
        start.wait()
        for _ in range(25):
            pair.stores[number % 2].add("n", 1)
            pair.stores[number % 2].append("a", "x")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count, range(8)))
    assert pair.stores[0].add("n", 0) == 200
    assert pair.stores[1].get("a") == b"x" * 200


def test_a_lost_store_wakes_all_waiting_calls():
    with serving() as server:
        store = connect("127.0.0.1", server.port, RUN)
        with ThreadPoolExecutor(4) as pool:
            waits = [pool.submit(store.get, f"k{number}") for number in range(4)]
            store.set("sent", "started or refused")
            server.inner.close()
            for wait in waits:
                # The connection is reset rather than closed if the store has not read all requests.
                with pytest.raises(DistNetworkError, match=r"closed|reset"):
                    wait.result(procs.HANG)
        with pytest.raises(DistNetworkError):
            store.set("k", "v")
        store.close()


def test_a_closed_store_refuses_requests(pair):
    store = pair.stores[0]
    store.close()
    with pytest.raises(DistNetworkError, match="closed"):
        store.get("k")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_store_program_requires_its_token_and_exits_on_a_signal(tmp_path, signum):
    # Only the final newline, which editors add, is removed. Everything else belongs to the token, as it does
    # for agents.
    (tmp_path / "token").write_bytes(b"secret \n")
    command = [sys.executable, "-m", "elasticrs.store", "--port", "0", "--run-id", RUN]
    command += ["--token-file", str(tmp_path / "token")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(line.rpartition(":")[2])
        assert line == f"elasticrs store: serving at *:{port}\n"
        for how in ({}, {"token": b"other"}):
            with pytest.raises(DistNetworkError, match="token"):
                connect("localhost", port, RUN, **how)
        store = connect("127.0.0.1", port, RUN, token=b"secret ")
        store.set("k", "v")
        process.send_signal(signum)
        out, err = process.communicate(timeout=procs.HANG)
        store.close()
    assert (process.returncode, out) == (0, "")
    refused, closing = err.splitlines()
    assert "token" in refused
    assert closing == f"elasticrs store: {signum.name}: closing (sessions: 1)"


def test_a_store_program_handles_nohup_and_a_lost_terminal():
    serve = [sys.executable, "-m", "elasticrs.store", "--port", "0"]
    with subprocess.Popen(
        ["nohup", *serve], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert b"serving at" in process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert b"SIGTERM: closing" in process.communicate(timeout=procs.HANG)[1]
        assert process.returncode == 0
    ours, theirs = os.openpty()
    with subprocess.Popen(
        serve, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(ours, 100)
        assert b"serving at" in line
        # Close the terminal, so that writing to it fails. Send SIGHUP, as the kernel does to foreground
        # processes of a closed terminal.
        os.close(ours)
        process.send_signal(signal.SIGHUP)
        assert process.wait(procs.HANG) == 0


def test_a_store_program_raises_its_descriptor_limit():
    command = ["prlimit", "--nofile=100:300", sys.executable, "-m", "elasticrs.store", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (300, 300)
        process.terminate()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "x"], "--port"),
        (["--port", "70000"], "70000"),
        (["--max-mib", "0"], "--max-mib"),
        (["--max-mib", "99999999999999"], "--max-mib"),
        (["--max-connections", str(1 << 64)], "--max-connections"),
        (["--token-file", "/no/such"], "/no/such"),
        (["--token-file", os.devnull], os.devnull),
        (["--host", "no-such-host.invalid"], "no-such-host.invalid:29400"),
        (["--host", "192.0.2.1"], f"192.0.2.1:29400: {os.strerror(errno.EADDRNOTAVAIL)}"),
        (["--run-id", "x" * 513], "513"),
        (["--state", ""], "--state"),
        (["--grace", "5"], "--state"),
        (["--state", "x", "--grace", "0"], "--grace"),
        (["--state", "x", "--grace", "nan"], "--grace"),
    ],
)
def test_an_invalid_argument_of_the_store_program_is_named_in_one_line(arguments, says):
    command = [sys.executable, "-m", "elasticrs.store", *arguments]
    ended = run_program(command)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert says in ended.stderr
    assert ended.stderr.startswith("python -m elasticrs.store: ")
    assert ended.stderr.count("\n") == 1
