"""Node ranks and a port that the user assigns: taken ranks, refused nodes, and a port lent to workers."""

import itertools

import pytest

from elasticrs._engine.nodes.protocol import messages as m
from elasticrs._engine.nodes.protocol.machine import Phase, step
from elasticrs._engine.nodes.transport.coordination import ConnectionLost
from rendezvous import agents
from rendezvous.cluster import Cluster, ends

PORT = 29500
NOT_OURS = ("not_ours", "port 29500: another program")


class Static(Cluster):
    """A cluster whose agents have fixed ranks."""

    def __init__(self, size, **settings):
        how = {"min_nodes": size, "max_nodes": size, "max_restarts": 3, "backend": "static", "port": PORT}
        super().__init__(**how, **settings)

    def rank(self, node_rank, name=None, **differs):
        return self.add(name or f"n{node_rank}", node_rank=node_rank, order_hint=node_rank, **differs)


def ranks(*agents):
    return [agent.starts[-1].group_rank for agent in agents]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_group_ranks_equal_node_ranks_in_any_join_order(order):
    cluster = Static(3)
    agents = {node_rank: cluster.rank(node_rank) for node_rank in order}
    starts = [agents[node_rank].starts[-1] for node_rank in range(3)]
    assert [start.group_rank for start in starts] == [0, 1, 2]
    assert [start.serves_store for start in starts] == [True, False, False]
    assert {(start.master_addr, start.master_port) for start in starts} == {("head", PORT)}
    assert not any(agent.all(m.BindStore) for agent in agents.values())


def test_each_node_uses_its_own_address_and_port():
    cluster = Static(3)
    given = [("0.0.0.0", PORT), ("head", PORT), ("10.9.0.1", 40000)]
    agents = [cluster.rank(rank, host=host, port=port) for rank, (host, port) in enumerate(given)]
    assert [(each.starts[0].master_addr, each.starts[0].master_port) for each in agents] == given
    assert agents[0].member.node().shown == "n0 (10.0.0.1)"


@pytest.mark.parametrize("lost", [(1,), (2,), (1, 2)])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_returning_node_gets_its_own_rank(lost, is_reversed):
    cluster = Static(4)
    agents = [cluster.rank(node_rank) for node_rank in range(4)]
    for node_rank in lost:
        agents[node_rank].kill()
    stay = [agent for node_rank, agent in enumerate(agents) if node_rank not in lost]
    for agent in stay:
        agent.send(m.GroupEnded())
    assert {agent.starts[-1].round for agent in stay} == {1}
    for node_rank in reversed(lost) if is_reversed else lost:
        agents[node_rank] = cluster.rank(node_rank, f"new{node_rank}")
    assert ranks(*agents) == [0, 1, 2, 3]
    assert {agent.starts[-1].round for agent in agents} == {2}


def test_a_duplicate_node_rank_is_refused_with_the_names_of_both_nodes():
    cluster = Static(3)
    cluster.rank(0)
    b = cluster.rank(1)
    again = cluster.rank(1, "again")
    assert again.outcome is None
    assert "rank" in again.timers
    again.fire("rank")
    ends(again.outcome, "refused", "rank 1", "n1 (10.0.0.2)", "again (10.0.0.3)", "--node-rank", "0 to 2")
    assert b.member.registered
    c = cluster.rank(2)
    assert ranks(b, c) == [1, 2]
    assert not again.starts


def test_the_rank_of_a_dead_node_is_free_after_its_lease_has_ended():
    cluster = Static(2)
    cluster.rank(0)
    b = cluster.rank(1)
    # The agent's machine died, but the store has not noticed that yet.
    cluster.agents.remove(b)
    again = cluster.rank(1, "again")
    assert not again.member.registered
    cluster.store.end_session(b.conn)
    again.fire("reconnect")
    assert again.member.registered
    assert "rank" not in again.timers


def test_an_agent_takes_over_its_rank_from_its_own_earlier_registration():
    cluster = Static(3)
    cluster.rank(0)
    b = cluster.rank(1)
    old = b.conn
    # The store has not noticed the end of this connection.
    old.open = False
    b.conn = None
    b.send(ConnectionLost("silent", "no answer"))
    while not b.member.registered:
        b.fire("reconnect")
        assert "rank" not in b.timers
    cluster.store.end_session(old)
    cluster.run()
    assert cluster.store.get(cluster.keys.rank(1)) is not None
    c = cluster.rank(2)
    assert ranks(b, c) == [1, 2]


def test_node_ranks_are_released_when_the_job_ends():
    cluster = Static(2)
    a, b = cluster.rank(0), cluster.rank(1)
    for agent in (a, b):
        agent.send(m.WorkersDone())
    assert [agent.outcome for agent in (a, b)] == [m.Outcome("succeeded")] * 2
    assert not cluster.store.under(cluster.keys.ranks)


def test_the_join_timeout_error_names_missing_and_present_ranks():
    cluster = Static(4, join_timeout=5)
    cluster.rank(3)
    b = cluster.rank(1)
    leading = next(agent for agent in cluster.agents if agent.member.leader is not None)
    leading.fire("join/0")
    names = ("rank 1 is n1 (10.0.0.2)", "rank 3 is n3 (10.0.0.1)", "no node", "rank 0, 2")
    ends(b.outcome, "timeout", "2", "4", "5 s (join_timeout)", *names)


def test_connecting_to_a_lent_port_is_retried_and_reported_once():
    member = agents.member("01", "a", backend="static", host="h", port=PORT, join_timeout=5, node_rank=1)
    step(member, m.Begin())
    told = []
    for _ in range(3):
        _, actions = step(member, ConnectionLost(*NOT_OURS))
        assert not any(isinstance(each, m.Exit) for each in actions)
        told += [each.text for each in actions if isinstance(each, m.Announce)]
        step(member, m.TimerFired("reconnect"))
    (line,) = told
    assert line.startswith(NOT_OURS[1])
    _, actions = step(member, m.TimerFired("connect"))
    (end,) = [each.outcome for each in actions if isinstance(each, m.Exit)]
    ends(end, "timeout", "h:29500", "5 s", NOT_OURS[1], "earlier round")
    assert member.phase is Phase.EXIT


def test_workers_that_cannot_bind_the_port_fail_the_job():
    cluster = Static(2)
    a, b = cluster.rank(0), cluster.rank(1)
    a.send(m.StartFailed("port 29500", False))
    b.send(m.GroupEnded())
    for agent in (a, b):
        ends(agent.outcome, "failed", "node n0", "port 29500")
