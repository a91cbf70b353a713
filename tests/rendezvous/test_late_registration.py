"""A late registration does not delete a newer one of the same agent."""

from elasticrs._engine.nodes.protocol import messages as m
from elasticrs._engine.nodes.transport.coordination import ConnectionLost, Put, Txn
from rendezvous.cluster import running
from rendezvous.rules_off import rule_off


def is_registration(request):
    return isinstance(request, Txn) and any(isinstance(op, Put) and op.leased for op in request.then)


def registers_twice():
    """Create an agent that gives up a connection on which its second registration is still in transit.

    Returns:
        The cluster, the agent with its third registration, and the connection that still carries the second.
    """
    cluster, (agent,) = running(1)
    cluster._running = True  # disables `run`, because the test makes each turn itself
    agent.lose()
    agent.send(m.GroupEnded())
    while agent.conn is None or not any(map(is_registration, agent.conn.requests)):
        if not cluster._turn():
            agent.fire("reconnect")
    # The client has dropped the connection. The store has not noticed, so the session is still open.
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


def test_a_late_registration_does_not_delete_a_newer_registration():
    cluster, agent, late = registers_twice()
    before = keys_of_the_newest(cluster, agent)
    assert None not in before
    while late.requests:
        cluster.store.serve(late)
    assert keys_of_the_newest(cluster, agent) == before


def test_deleting_by_agent_would_also_delete_a_newer_registration():
    with rule_off("registration_deletes_by_agent"):
        cluster, agent, late = registers_twice()
        assert None not in keys_of_the_newest(cluster, agent)
        while late.requests:
            cluster.store.serve(late)
        assert keys_of_the_newest(cluster, agent) == [None, None]
