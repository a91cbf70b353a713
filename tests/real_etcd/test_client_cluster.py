"""The etcd v3 client while members of the cluster are killed and stopped."""

import pytest
from helpers.etcd_client import EtcdClient
from helpers.etcd_fixtures import serving, site
from helpers.procs import wait_until

from elasticrs import _core
from elasticrs._core import Compare, Op

ROUNDS = 30


def read(client: EtcdClient) -> tuple[int, list[str]]:
    event = client.next(_core.Changes)
    return event.revision, [change.key for change in event.changes]


@pytest.fixture
def own_cluster(tmp_path, etcd_program):
    """Three etcd members for a single test. In etcd 3.5.0 to 3.5.2, a member that is killed under traffic can
    lose a transaction (etcd issue 13766), which would break the tests after it.
    """
    for server in serving(tmp_path, 3):
        yield site(server)


@pytest.mark.parametrize(
    ("is_leader", "harm"),
    [
        (True, "kill"),
        (False, "stop"),
        pytest.param(True, "stop", marks=pytest.mark.slow),
        pytest.param(False, "kill", marks=pytest.mark.slow),
    ],
)
def test_transactions_are_applied_and_reported_once_while_members_fail(
    own_cluster, connect_etcd, harm, is_leader
):
    """Each transaction is applied once, and the watches report all transactions once and in order."""
    server, prefix = own_cluster.server, f"{own_cluster.prefix}/"
    ends = server.endpoints
    clients = [connect_etcd(ends, prefix, ttl=30.0).connected() for _ in range(6)]
    watcher = connect_etcd(ends, prefix, ttl=30.0).connected()
    watcher.watch("n/")
    leader = server.leader()
    victim = leader if is_leader else (leader + 1) % 3
    for number in range(ROUNDS):
        for index, client in enumerate(clients):
            key = f"n/{index}/{number}"
            client.tag += 1
            client.inner.txn(client.tag, [Compare.missing(key)], [Op.put(key, b"", False)], [Op.get(key)])
        if number == ROUNDS // 3:
            getattr(server, harm)(victim)
        # If a transaction were applied twice, the second attempt would find its key and fail.
        assert all(client.reply().ok for client in clients)
        if number == ROUNDS // 3 * 2:
            server.bring_back(victim)
    count = ROUNDS * len(clients)
    told = [read(watcher) for _ in range(count)]
    assert len({key for _, keys in told for key in keys}) == count
    # Each key was written once, so its revision is the one that the watcher must have been told of.
    entries = clients[0].txn(then=[Op.range("n/", 0)]).results[0]
    assert told == sorted((entry.mod_revision, [entry.key]) for entry in entries)
    server.mend()
    # Poll, because a member that was paused may return old data (etcd issue 20418).
    wait_until(lambda: len(own_cluster.keys()), lambda found: found == count + len(clients) + 1)


def test_a_session_ends_if_a_majority_of_members_stops_answering(etcd_cluster, connect_etcd):
    server = etcd_cluster.server
    client = connect_etcd(server.endpoints, f"{etcd_cluster.prefix}/", ttl=3.0).connected()
    client.put("mine", leased=True)
    for index in (1, 2):
        server.stop(index)
    lost = client.lost()
    assert lost.kind == "silent"
    assert "\n" not in lost.message
