"""The client of etcd v3 keeps what the interface of the coordination store promises."""

import os

import pytest
from helpers.procs import wait_until

from elasticrs import _core
from elasticrs.store.coordination import MAX_OPERATIONS


@pytest.fixture
def connect(etcd, connect_etcd):
    """Clients of one run."""
    return lambda **options: connect_etcd(etcd.server.endpoints, f"{etcd.prefix}/", **options)


@pytest.fixture
def client(connect):
    return connect().connected()


@pytest.fixture
def other(connect):
    return connect().connected()


def pair(found):
    return found and (found.key, found.value)


def test_a_session_begins_with_its_lease_and_the_address_of_its_host(etcd, connect):
    connected = connect(ttl=3.2).next(_core.Connected)
    assert (connected.ttl, connected.local_address, connected.peer_address) == (4.0, "127.0.0.1", "127.0.0.1")
    assert str(connected.session) in etcd.server.leases()


def test_reads_of_a_transaction_see_its_writes(client):
    reply = client.txn(
        [("missing", "k")], [("put", "k", b"1", False), ("get", "k"), ("range", "", 0), ("delete", "none")]
    )
    assert reply.ok
    one, got, (found,), none = reply.results
    assert (one, none, pair(got), pair(found)) == (1, 0, ("k", b"1"), ("k", b"1"))
    assert found.create_revision == found.mod_revision == reply.revision


def test_a_transaction_whose_compares_fail_does_the_other_thing(client):
    client.put("k", b"v")
    reply = client.txn(
        [("exists", "k"), ("value", "k", b"w")], [("delete", "k")], [("get", "k"), ("get", "none")]
    )
    assert (reply.ok, [pair(each) for each in reply.results]) == (False, [("k", b"v"), None])


def test_compares(client):
    made, changed = client.put("k", b"1"), client.put("k", b"2")
    holds = [("create", "k", made), ("create", "none", 0), ("mod", "k", changed), ("mod", "none", 0)]
    holds += [("exists", "k"), ("missing", "none"), ("value", "k", b"2")]
    fails = [("create", "k", changed), ("mod", "k", made), ("exists", "none"), ("missing", "k")]
    fails += [("value", "none", b""), ("value", "k", b"1"), ("create", "k", 0)]
    assert [client.txn([compare]).ok for compare in holds] == [True] * len(holds)
    assert [client.txn([compare]).ok for compare in fails] == [False] * len(fails)


def test_deletions_say_how_many_they_were(client):
    for key in ("a/1", "a/2", "b"):
        client.put(key)
    assert client.txn(then=[("delete_prefix", "a/"), ("delete", "b"), ("delete", "c")]).results == [2, 1, 0]


def test_a_range_may_have_a_limit(client):
    for key in ("a/2", "a/1", "b"):
        client.put(key)
    (found,) = client.txn(then=[("range", "a/", 1)]).results
    assert [each.key for each in found] == ["a/1"]


def test_the_predecessor_is_the_one_made_before(client):
    for key in ("n/b", "n/a", "other", "n/c"):
        client.put(key)
    client.put("n/b", b"overwritten")
    found = client.txn(then=[("predecessor", "n/", key) for key in ("n/b", "n/a", "n/c", "none")])
    assert [each and each.key for each in found.results] == [None, "n/b", "n/a", None]


def test_of_keys_made_together_the_last_by_name_is_the_predecessor(client):
    client.txn(then=[("put", key, b"", False) for key in ("n/2", "n/3", "n/1")])
    found = client.txn(then=[("put", "n/0", b"", False), ("predecessor", "n/", "n/0")])
    assert found.results[1].key == "n/3"


def test_the_lease_ends_with_the_session(etcd, client, other):
    client.txn(then=[("put", f"mine/{n}", b"", n < 3) for n in (1, 2, 3)])
    # Written over by somebody else, it still is the owner's.
    other.put("mine/1", b"new")
    found = other.watch("mine/", snapshot=True).results
    assert [each.key for each in found] == ["mine/1", "mine/2", "mine/3"]
    made = {each.key: each.create_revision for each in found}
    client.close()
    changes = other.next(_core.Changes).changes
    assert sorted((each.key, each.value) for each in changes) == [("mine/1", None), ("mine/2", None)]
    assert all(each.create_revision == made[each.key] for each in changes)


def test_a_leased_put_takes_over_the_lease(client, other):
    client.put("k", leased=True)
    other.put("k", leased=True)
    client.close()
    assert other.txn([("exists", "k")]).ok


def test_nothing_of_a_session_is_left(etcd, client, other):
    client.put("k", leased=True)
    leases = etcd.server.leases()
    client.close()
    other.close()
    assert etcd.keys() == {}
    assert len(etcd.server.leases()) == len(leases) - 2


def test_keys_without_a_lease_get_that_of_the_job(etcd, connect):
    job = (abs(hash(etcd.prefix)) | 1, 3600.0)
    first, second = connect(job_lease=job).connected(), connect(job_lease=job).connected()
    first.put("job", b"1")
    second.put("job", b"2")
    first.close()
    second.close()
    assert etcd.keys() == {"/job": b"2"}
    etcd.server.ask("lease/revoke", ID=job[0])
    assert etcd.keys() == {}


def test_the_lease_of_the_job_is_made_again_when_it_is_gone(etcd, connect):
    job = (abs(hash(etcd.prefix)) | 1, 3600.0)
    client = connect(job_lease=job).connected()
    etcd.server.ask("lease/revoke", ID=job[0])
    client.put("job", b"1")
    assert str(job[0]) in etcd.server.leases()


def test_what_was_asked_before_the_end_is_done(etcd, client):
    for index in range(20):
        client.inner.txn(index, [], [("put", f"k{index}", b"", False)])
    client.close()
    assert len(etcd.keys()) == 20


def test_each_revision_comes_whole_and_once_and_in_order(client, other):
    other.watch("a/")
    client.txn(then=[("put", "a/1", b"1", False), ("put", "x", b"", False), ("put", "a/2", b"2", False)])
    client.put("a/1", b"3")
    assert sorted(other.changes()) == [("a/1", b"1"), ("a/2", b"2")]
    assert other.changes() == [("a/1", b"3")]


def test_a_watch_of_a_key_does_not_cover_longer_ones(client, other):
    other.watch("k", exact=True)
    client.put("kk")
    client.put("k")
    assert other.changes() == [("k", b"")]


def test_a_watch_goes_on_right_after_its_snapshot(client, other):
    for index in range(20):
        client.inner.txn(index, [], [("put", f"w/{index:02}", b"", False)])
    found = [each.key for each in other.watch("w/", snapshot=True).results]
    while len(found) < 20:
        found += [key for key, _ in other.changes()]
    assert found == [f"w/{index:02}" for index in range(20)]


def test_a_watch_may_begin_in_the_past(client, other):
    revisions = [client.put("k", value) for value in (b"1", b"2", b"3")]
    assert other.watch("k", from_revision=revisions[1]).results == []
    assert [other.changes(), other.changes()] == [[("k", b"2")], [("k", b"3")]]
    client.put("k", b"4")
    assert other.changes() == [("k", b"4")]


def test_a_watch_on_what_is_forgotten_names_a_revision_that_is_known(etcd, client):
    first = client.put("k")
    client.put("k", b"2")
    etcd.server.compact()
    reply = client.watch("k", from_revision=first)
    assert not reply.ok
    assert client.watch("k", from_revision=reply.results[0]).ok
    client.put("k", b"3")
    assert client.changes() == [("k", b"3")]


def test_after_unwatch_nothing_comes(client, other):
    other.watch("k")
    other.inner.unwatch("k")
    other.watch("end")
    client.put("k")
    client.put("end")
    assert other.changes() == [("end", b"")]


def test_the_markers_of_sessions_are_nobodys_keys(client, other):
    other.watch("", snapshot=True)
    client.put("k", leased=True)
    client.close()
    assert [other.changes(), other.changes()] == [[("k", b"")], [("k", None)]]
    assert other.txn(then=[("range", "", 0)]).results == [[]]


def test_requests_that_are_too_large_are_not_sent(client):
    with pytest.raises(ValueError, match="a request of"):
        client.inner.txn(1, [], [("put", "k", bytes(2 << 20), True)])
    client.put("k", bytes(500_000))


def test_the_largest_transaction_of_the_rendezvous_is_one(client):
    keys = [f"k{index}" for index in range(MAX_OPERATIONS)]
    for _ in range(2):
        reply = client.txn(
            [("value", "k", b"")] + [("missing", "none")] * (MAX_OPERATIONS - 1),
            [("get", "k")],
            [("put", key, b"v", False) for key in keys],
        )
        assert (reply.ok, reply.results) == (False, [1] * MAX_OPERATIONS)
    assert client.txn(then=[("delete_prefix", "k")]).results == [MAX_OPERATIONS]


def test_a_transaction_beyond_the_limits_of_etcd(client):
    for index in range(200):
        client.inner.txn(index, [], [("get", "k")] * 200)
    lost = client.lost()
    assert (lost.kind, "too many operations" in lost.message) == ("limit", True)


def test_there_is_no_clock(client):
    client.put("k")
    assert client.inner.clock() is None


def test_a_session_leaves_no_descriptor_and_no_thread(connect):
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
        ({"ttl": 1.0}, "ttl must be at least 2"),
        ({"user": "u"}, "user and password go together"),
        ({"cert": "c", "is_tls": True}, "cert and key go together"),
        ({"read_timeout": -1.0}, "read_timeout"),
    ],
)
def test_options_that_make_no_sense(connect, options, says):
    with pytest.raises(ValueError, match=says):
        connect(**options)


def test_no_endpoint_is_one_too_few(connect_etcd):
    with pytest.raises(ValueError, match="at least one endpoint"):
        connect_etcd([], "x/")


def test_somebody_revokes_the_lease(etcd, connect):
    client = connect(ttl=3.0)
    session = client.next(_core.Connected).session
    etcd.server.ask("lease/revoke", ID=session)
    lost = client.lost()
    assert lost.kind == "silent"
    assert "revoked" in lost.message
    wait_until(lambda: not etcd.keys())
