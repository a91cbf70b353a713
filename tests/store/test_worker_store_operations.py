"""Every operation of torch's own client on the workers' store, with its edge cases."""

import pytest
from helpers.torch_clients import ClientError

pytestmark = pytest.mark.torch


@pytest.fixture
def client(connect):
    return connect()


def test_a_set_value_is_returned(client):
    client.call("set", "key", "first")
    client.call("set", "key", b"\0\xff")
    assert client.call("get", "key") == b"\0\xff"
    client.call("set", "", b"")
    assert client.call("get", "") == b""


def test_a_cloned_client_reads_the_same_values(client):
    client.call("set", "key", "value")
    if not client.ask("can", "clone"):
        pytest.skip("this torch cannot clone")
    client.ask("clone")
    assert client.call("get", "key") == b"value"


def test_numbers_are_added_and_stored_as_text(client):
    assert [client.call("add", "n", delta) for delta in (5, -7, 0)] == [5, -2, -2]
    assert client.call("get", "n") == b"-2"
    client.call("set", "n", " 12ab")
    assert client.call("add", "n", 1) == 13
    client.call("set", "n", str(2**63 - 1))
    assert client.call("add", "n", 1) == -(2**63)


def test_compare_set_replaces_only_the_expected_value(client):
    for key, (before, expected, reply, after) in {
        "missing, as expected": (None, "", b"new", b"new"),
        "missing": (None, "old", b"old", None),
        "as expected": (b"old", "old", b"new", b"new"),
        "another": (b"old", "other", b"old", b"old"),
        "not missing": (b"old", "", b"old", b"old"),
    }.items():
        if before is not None:
            client.call("set", key, before)
        assert client.call("compare_set", key, expected, "new") == reply, key
        assert client.call("check", [key]) is (after is not None), key
        assert after is None or client.call("get", key) == after, key


def test_keys_are_checked_counted_listed_and_deleted(client):
    assert client.call("num_keys") == 0
    client.call("multi_set", ["a", "b"], ["1", "2"])
    client.call("append", "c", "x")
    client.call("append", "c", "y")
    assert client.call("multi_get", ["c", "b", "a"]) == [b"xy", b"2", b"1"]
    assert client.call("check", ["a", "b", "a"])
    assert client.call("check", [])
    assert not client.call("check", ["a", "none"])
    assert sorted(client.call("list_keys")) == ["a", "b", "c"]
    assert client.call("num_keys") == 3
    assert client.call("delete_key", "a")
    assert not client.call("delete_key", "a")
    assert client.call("num_keys") == 2


def test_a_queue_is_fifo_and_separate_from_a_value_with_the_same_name(client):
    client.call("set", "q", "value")
    for value in ("one", "", "three"):
        client.call("queue_push", "q", value)
    assert client.call("queue_len", "q") == 3
    assert client.call("num_keys") == 1
    assert [client.call("queue_pop", "q") for _ in range(3)] == [b"one", b"", b"three"]
    assert client.call("queue_len", "q") == 0
    assert client.call("get", "q") == b"value"
    with pytest.raises(ClientError, match="QueueEmptyError"):
        client.call("queue_pop", "q", False)


def test_queue_pop_waits_for_queue_push(client, connect, wait_for_waiters):
    poppers = [connect(), connect()]
    for popper in poppers:
        popper.begin_call("queue_pop", "q")
    wait_for_waiters(2)
    client.call("queue_push", "q", "one")
    client.call("queue_push", "q", "two")
    assert sorted(popper.result() for popper in poppers) == [b"one", b"two"]


def test_a_wait_ends_when_the_last_key_has_been_set(client, connect, store, wait_for_waiters):
    waiter = connect()
    waiter.begin_call("wait", ["a", "b", "b"])
    wait_for_waiters(1)
    client.call("set", "a", "1")
    client.call("delete_key", "a")
    assert list(store.waiting().values()) == [["/b"]]
    client.call("add", "b", 1)
    assert waiter.result() is None
    assert store.waiting() == {}


def test_a_client_is_usable_after_a_wait_has_timed_out(client, connect, store):
    other = connect()
    for _ in range(3):
        with pytest.raises(ClientError, match=r"DistStoreError.*wait timeout after 50ms"):
            client.call("wait", ["never"], timeout=0.05)
    assert store.waiting() == {}
    other.call("set", "never", "now")
    client.call("wait", ["never"])
    assert client.call("get", "never") == b"now"
    # Set the time limit after connecting, because the limit would otherwise apply to connecting, too.
    client.call("set_timeout", timeout=0.05)
    with pytest.raises(ClientError, match="timeout"):
        client.call("get", "none")


def test_waiting_clients_and_their_keys_are_listed(client, wait_for_waiters):
    client.begin_call("wait", ["/deep/key", "other"], timeout=20.0)
    ((who, keys),) = wait_for_waiters(1).items()
    assert who.endswith(f"(pid {client.pid})")
    assert sorted(keys) == ["//deep/key", "/other"]


def test_nested_prefixes_apply_to_store_operations(client, connect):
    inner = connect(prefixes=("in", "out"))
    inner.call("set", "key", "value")
    assert client.call("get", "in/out/key") == b"value"
    assert inner.call("add", "n", 2) == 2
    inner.call("wait", ["key", "n"])
    assert inner.call("check", ["n"])
    inner.call("multi_set", ["x"], ["1"])
    assert inner.call("multi_get", ["x"]) == [b"1"]
    inner.call("queue_push", "q", "v")
    assert client.call("queue_pop", "in/out/q") == b"v"
    assert inner.call("delete_key", "key")


@pytest.mark.parametrize("prefixes", [(), ("p",)])
def test_a_barrier_releases_all_clients_when_the_last_one_arrives(connect, wait_for_waiters, prefixes):
    clients = [connect(prefixes=prefixes) for _ in range(4)]
    for client in clients[:3]:
        client.begin_call("barrier", "b", 4)
    wait_for_waiters(3)
    assert not any(client.is_done() for client in clients)
    clients[3].call("barrier", "b", 4)
    for client in clients[:3]:
        client.result()


def test_connecting_with_wait_for_workers_counts_workers_without_waiting(connect):
    clients = [connect(world_size=3, wait_for_workers=True) for _ in range(3)]
    assert clients[0].call("num_keys") == 1
    # Workers are counted in a key without a leading slash, so that no client can name it.
    assert clients[0].call("list_keys") == []


@pytest.mark.parametrize("size", [1, 70_000, 8 * 1024 * 1024])
def test_large_values_are_stored(client, connect, size):
    value = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    client.call("set", "large", value)
    client.call("queue_push", "q", value)
    other = connect()
    assert other.call("get", "large") == value
    assert other.call("queue_pop", "q") == value
    assert other.call("multi_get", ["large", "large"]) == [value, value]


def test_one_request_can_contain_many_keys(client):
    keys = [f"key/{number}" for number in range(20_000)]
    client.call("multi_set", keys, keys)
    assert client.call("check", keys)
    assert client.call("multi_get", keys) == [key.encode() for key in keys]
    assert len(client.call("list_keys")) == 20_000


def test_closing_the_store_ends_a_wait(connect, store, wait_for_waiters):
    waiter = connect()
    waiter.begin_call("wait", ["never"])
    wait_for_waiters(1)
    store.close()
    with pytest.raises(ClientError, match=r"DistNetworkError|DistStoreError"):
        waiter.result()


def mixed(fork, store, clients, operations):
    workers = fork(clients)
    for worker in workers:
        worker.ask("connect", store.port, {})
    for number, worker in enumerate(workers):
        worker.begin("mixed", number, operations, number)
    added = sum(worker.result(240.0) for worker in workers)
    assert added > 0
    assert workers[0].call("add", "shared", 0) == added


def test_16_clients_get_the_results_of_a_reference_model(fork, store):
    mixed(fork, store, 16, 500)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_64_clients_with_10000_operations_match_the_reference_model(fork, store):
    mixed(fork, store, 64, 10_000)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_a_torch_process_group_can_be_created(fork, store, size):
    ranks = fork(size)
    for number, rank in enumerate(ranks):
        rank.begin("process_group", number, size, store.port)
    for rank in ranks:
        assert rank.result() == [{"rank": number} for number in range(size)]
    assert store.take_notices() == []
