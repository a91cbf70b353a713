"""A member whose store was away: requests applied twice, longer leases, and a different store."""

import pytest

from elasticrs._engine.nodes.protocol import messages as m
from elasticrs._engine.nodes.protocol.machine import step
from elasticrs._engine.nodes.transport.coordination import Connected, ConnectionLost, Txn
from rendezvous import agents
from rendezvous.cluster import Cluster, end_all, ends, running
from rendezvous.rules_off import rule_off

WHY = "head:29400: another store"


def all_is_carried_out_twice(cluster):
    """Apply each transaction twice, as if the first reply had been lost with its connection."""
    serve = cluster.store.serve

    def twice(conn):
        request = conn.requests[0]
        if isinstance(request, Txn):
            waiting = len(conn.replies)
            serve(conn)
            del conn.replies[waiting:]
            conn.requests.insert(0, request)
        serve(conn)

    cluster.store.serve = twice


def a_job(**settings):
    """Return a job whose requests are all applied twice."""
    cluster = Cluster(min_nodes=3, max_nodes=3, max_restarts=1, **settings)
    all_is_carried_out_twice(cluster)
    how = [{"node_rank": rank} if "port" in settings else {} for rank in range(3)]
    return cluster, [cluster.add(name, **each) for name, each in zip("abc", how, strict=True)]


@pytest.mark.parametrize("settings", [{}, {"backend": "static", "port": 29500}])
def test_a_job_succeeds_even_if_every_request_is_applied_twice(settings):
    cluster, nodes = a_job(**settings)
    assert [[start.round for start in each.starts] for each in nodes] == [[1]] * 3
    nodes[1].fail()
    end_all(nodes)
    assert [each.starts[-1].round for each in nodes] == [2] * 3
    assert (cluster.head.used, len(cluster.store.conns)) == (1, 3)
    for each in nodes:
        each.send(m.WorkersDone())
    assert [each.outcome for each in nodes] == [m.Outcome("succeeded")] * 3


def test_a_registration_applied_twice_keeps_its_first_revision():
    cluster, nodes = a_job()
    for each in nodes:
        entry = cluster.store.get(each.key)
        assert each.member.registration.create_revision == entry.create_revision < entry.mod_revision
    with rule_off("registered_when_it_was_last_put"):
        assert not a_job()[1][0].starts


def test_with_the_rule_disabled_an_agent_is_refused_by_its_own_registration():
    with rule_off("refused_by_itself"):
        _, nodes = a_job(backend="static", port=29500)
        assert not any(each.starts for each in nodes)


@pytest.mark.parametrize(("granted", "settle"), [(0.0, 45.0), (5.0, 45.0), (15.0, 65.0)])
def test_the_settle_timeout_covers_the_leases_granted_by_the_store(granted, settle):
    cluster, (a, b) = running(2)
    for each in (a, b):
        each.member.joining.ttl = granted
    a.fail()
    assert a.timers["settle/1"] == settle
    assert cluster.head.state == "ENDED"


def test_the_store_sets_the_lease_duration():
    member = agents.member("01", "a")
    step(member, m.Begin())
    step(member, Connected(1, "10.0.0.1", 15.0))
    assert member.more_lease == 10.0


def test_an_agent_exits_if_it_finds_a_different_store():
    _, (a, _) = running(2)
    a.refuses = ("other", WHY)
    a.lose("other", WHY)
    assert a.outcome is None
    assert a.all(m.Stop)[-1].fenced
    a.send(m.GroupEnded())
    assert a.outcome == m.Outcome("lost", WHY)


def test_a_node_without_workers_exits_if_it_finds_a_different_store():
    cluster = Cluster(min_nodes=2, max_nodes=2)
    a = cluster.add("a")
    a.lose("other", WHY)
    assert a.actions[-1] == m.Exit(m.Outcome("lost", WHY))


def test_an_older_copy_of_the_state_counts_as_a_different_store():
    cluster, (a, b) = running(2)
    before = cluster.store.revision - 1
    for each in (a, b):
        each.refuses = ("refused", "connection refused")
        each.lose()
        each.send(m.GroupEnded())
    cluster.store.revision = before
    a.refuses = None
    a.fire("reconnect")
    ends(a.outcome, "lost", "head:29400", "older copy")


def test_a_node_that_has_not_joined_is_refused_by_a_different_store():
    member = agents.member("01", "a")
    step(member, m.Begin())
    _, actions = step(member, ConnectionLost("other", WHY))
    assert actions[-1] == m.Exit(m.Outcome("refused", WHY))
