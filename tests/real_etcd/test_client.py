"""The etcd v3 client fulfills the contract of the coordination store's interface."""

import os

import pytest
from helpers.procs import wait_until
from helpers.store_contract import StoreContract

from elasticrs import _core
from elasticrs._core import Compare, Op
from elasticrs._engine.nodes.transport.coordination import MAX_OPERATIONS


@pytest.fixture
def connect(etcd, connect_etcd):
    """Connects clients that share the prefix of one run."""
    return lambda **options: connect_etcd(etcd.server.endpoints, f"{etcd.prefix}/", **options)


@pytest.fixture
def client(connect):
    return connect().connected()


@pytest.fixture
def other(connect):
    return connect().connected()


class TestContract(StoreContract):
    """Run the store contract tests with etcd."""


def test_a_new_session_reports_its_lease_and_local_address(etcd, connect):
    connected = connect(ttl=3.2).next(_core.Connected)
    assert (connected.ttl, connected.local_address) == (4.0, "127.0.0.1")
    assert str(connected.session) in etcd.server.leases()


def test_a_key_overwritten_by_another_session_keeps_its_lease(etcd, client, other):
    client.txn(then=[Op.put(f"mine/{n}", b"", n < 3) for n in (1, 2, 3)])
    # A key that another session overwrites keeps the lease of its owner.
    other.put("mine/1", b"new")
    found = other.watch("mine/", snapshot=True).results
    assert [each.key for each in found] == ["mine/1", "mine/2", "mine/3"]
    made = {each.key: each.create_revision for each in found}
    client.close()
    changes = other.next(_core.Changes).changes
    assert sorted((each.key, each.value) for each in changes) == [("mine/1", None), ("mine/2", None)]
    assert all(each.create_revision == made[each.key] for each in changes)


def test_a_closed_session_removes_its_keys_and_lease(etcd, client, other):
    client.put("k", leased=True)
    leases = etcd.server.leases()
    client.close()
    other.close()
    assert etcd.keys() == {}
    assert len(etcd.server.leases()) == len(leases) - 2


def test_unleased_keys_get_the_lease_of_the_job(etcd, connect):
    job = (abs(hash(etcd.prefix)) | 1, 3600.0)
    first, second = connect(job_lease=job).connected(), connect(job_lease=job).connected()
    first.put("job", b"1")
    second.put("job", b"2")
    first.close()
    second.close()
    assert etcd.keys() == {"/job": b"2"}
    etcd.server.ask("lease/revoke", ID=job[0])
    assert etcd.keys() == {}


def test_a_missing_job_lease_is_recreated(etcd, connect):
    job = (abs(hash(etcd.prefix)) | 1, 3600.0)
    client = connect(job_lease=job).connected()
    etcd.server.ask("lease/revoke", ID=job[0])
    client.put("job", b"1")
    assert str(job[0]) in etcd.server.leases()


def test_requests_sent_before_close_are_executed(etcd, client):
    for index in range(20):
        client.inner.txn(index, [], [Op.put(f"k{index}", b"", False)])
    client.close()
    assert len(etcd.keys()) == 20


def test_session_markers_are_hidden_from_watches_and_ranges(client, other):
    other.watch("", snapshot=True)
    client.put("k", leased=True)
    client.close()
    assert [other.changes(), other.changes()] == [[("k", b"")], [("k", None)]]
    assert other.txn(then=[Op.range("", 0)]).results == [[]]


def test_a_request_that_is_too_large_is_not_sent(client):
    with pytest.raises(ValueError, match=f"{1 << 20}"):
        client.inner.txn(1, [], [Op.put("k", bytes(2 << 20), True)])
    client.put("k", bytes(500_000))


def test_the_largest_transaction_of_the_rendezvous_is_accepted(client):
    keys = [f"k{index}" for index in range(MAX_OPERATIONS)]
    for _ in range(2):
        reply = client.txn(
            [Compare.has_value("k", b"")] + [Compare.missing("none")] * (MAX_OPERATIONS - 1),
            [Op.get("k")],
            [Op.put(key, b"v", False) for key in keys],
        )
        assert (reply.ok, reply.results) == (False, [1] * MAX_OPERATIONS)
    assert client.txn(then=[Op.delete_prefix("k")]).results == [MAX_OPERATIONS]


def test_a_transaction_beyond_the_limits_of_etcd_ends_the_session(client):
    for index in range(200):
        client.inner.txn(index, [], [Op.get("k")] * 200)
    lost = client.lost()
    assert (lost.kind, "too many operations" in lost.message) == ("limit", True)


def test_the_etcd_client_has_no_clock(client):
    client.put("k")
    assert client.inner.clock() is None


def test_a_closed_session_leaves_no_descriptor_and_no_thread(connect):
    def ours():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = ours()
    client = connect().connected()
    client.watch("", snapshot=True)
    client.close()
    assert ours() == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ttl": 1.0}, "ttl"),
        ({"user": "u"}, "password"),
        ({"cert": "c", "is_tls": True}, "key"),
        ({"read_timeout": -1.0}, "read_timeout"),
    ],
)
def test_invalid_options_are_refused(connect, options, says):
    with pytest.raises(ValueError, match=says):
        connect(**options)


def test_a_client_needs_an_endpoint(connect_etcd):
    with pytest.raises(ValueError, match="endpoint"):
        connect_etcd([], "x/")


def test_a_revoked_lease_ends_the_session(etcd, connect):
    client = connect(ttl=3.0)
    session = client.next(_core.Connected).session
    etcd.server.ask("lease/revoke", ID=session)
    lost = client.lost()
    assert lost.kind == "silent"
    assert "revoked" in lost.message
    wait_until(lambda: not etcd.keys())
