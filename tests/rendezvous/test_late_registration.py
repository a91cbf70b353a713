"""A registration that arrives late must not take a later one of the same agent with it."""

from elasticrs.rendezvous.elastic import messages as m
from elasticrs.store.coordination import ConnectionLost, Put, Txn
from rendezvous.cluster import running
from rendezvous.rules_off import rule_off


def is_registration(request):
    return isinstance(request, Txn) and any(isinstance(op, Put) and op.leased for op in request.then)


def registers_twice():
    """One agent whose second registration is on the wire when it gives that connection up.

    Returns:
        The cluster, the agent with its third registration, and the connection that still carries the second.
    """
    cluster, (agent,) = running(1)
    cluster._running = True  # The test takes each turn itself.
    agent.lose()
    agent.send(m.GroupEnded())
    while agent.conn is None or not any(map(is_registration, agent.conn.requests)):
        if not cluster._turn():
            agent.fire("reconnect")
    # The client has let go, and the store has not heard of it: the session is not over.
    late, agent.conn = agent.conn, None
    late.open = False
    agent.send(ConnectionLost("closed", "reset"))
    agent.fire("reconnect")
    while cluster._turn():
        pass
    return cluster, agent, late


def keys_of_the_newest(cluster, agent):
    newest = agent.member.registration.member
    assert newest.endswith("/3")
    return [cluster.store.get(key(newest)) for key in (cluster.keys.node, cluster.keys.slot)]


def test_a_late_registration_deletes_earlier_ones_alone():
    cluster, agent, late = registers_twice()
    before = keys_of_the_newest(cluster, agent)
    assert None not in before
    while late.requests:
        cluster.store.serve(late)
    assert keys_of_the_newest(cluster, agent) == before


def test_deleting_by_agent_would_take_the_newest():
    with rule_off("registration_deletes_by_agent"):
        cluster, agent, late = registers_twice()
        assert None not in keys_of_the_newest(cluster, agent)
        while late.requests:
            cluster.store.serve(late)
        assert keys_of_the_newest(cluster, agent) == [None, None]
