"""Tests for a member whose store was away, so that requests are applied twice, leases are longer, or another
store answers. Also for a store that reports each watch separately, as etcd does, so that one watch may be
ahead of another.
"""

import pytest
from helpers.said import says

from elasticrs._engine.nodes.protocol import messages as m
from elasticrs._engine.nodes.protocol.machine import step
from elasticrs._engine.nodes.protocol.records import Head, Slot
from elasticrs._engine.nodes.transport.coordination import (
    Changes,
    Connected,
    ConnectionLost,
    Get,
    Put,
    Reply,
    Txn,
    Unwatch,
    Watch,
)
from rendezvous import agents
from rendezvous.cluster import Cluster, end_all, ends, running
from rendezvous.rules_off import rule_off
from rendezvous.store import Entry

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
        assert each.member.link.create_revision == entry.create_revision < entry.mod_revision
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


# --- watches that report separately ---


class Told:
    """An agent that has joined and waits. The test decides what its watches report."""

    def __init__(self):
        cluster = Cluster(min_nodes=3, max_nodes=3)
        cluster.add("a")
        self.member = cluster.add("b").member
        self.head_key = cluster.keys.head
        self.slot_key = cluster.keys.slot(self.member.link.member)

    def head(self, revision, form, state="RUNNING", number=1):
        value = Head(
            state, number, form, size=3, world_size=3, master=("h", 1), end={"kind": "scale"}
        ).encode()
        return step(self.member, Changes(revision, [Entry(self.head_key, value, 100, revision)]))[1]

    def slot(self, revision, form):
        return step(self.member, Changes(revision, [self.slot_entry(revision, form)]))[1]

    def slot_entry(self, revision, form):
        return Entry(self.slot_key, Slot(1, form, 1, 1, 1, 3).encode(), 100, revision)

    def answer(self, actions, revision, entry):
        """Answer the agent's request for its slot, and return its next actions."""
        (asked,) = actions_of(Txn, actions)
        assert asked.then == [Get(self.slot_key)]
        return step(self.member, Reply(asked.tag, True, revision, [entry]))[1]


def actions_of(kind, actions):
    return [each for each in actions if isinstance(each, kind)]


def idle_of(actions):
    """Return the keys that the agent writes to report that it is idle."""
    puts = [op for each in actions_of(Txn, actions) for op in each.then if isinstance(op, Put)]
    return [put.key for put in puts]


def test_workers_start_if_the_head_record_arrives_before_the_slot_record():
    b = Told()
    assert not actions_of(m.Start, b.head(102, "1.1"))
    assert len(actions_of(m.Start, b.slot(101, "1.1"))) == 1


@pytest.mark.parametrize("watch_is_first", [False, True])
def test_an_agent_with_an_outdated_slot_waits_for_the_slot_of_the_new_head(watch_is_first):
    b = Told()
    b.slot(101, "1.1")
    asked = b.head(103, "1.2")
    assert not idle_of(asked)
    if watch_is_first:
        assert actions_of(m.Start, b.slot(102, "1.2"))
        assert not b.answer(asked, 103, b.slot_entry(102, "1.2"))
    else:
        assert actions_of(m.Start, b.answer(asked, 103, b.slot_entry(102, "1.2")))
        assert not b.slot(102, "1.2")


def test_an_agent_left_out_of_the_final_proposal_reports_that_it_is_idle():
    b = Told()
    b.slot(101, "1.1")
    told = b.answer(b.head(103, "1.2"), 103, b.slot_entry(101, "1.1"))
    assert len(idle_of(told)) == 1


def test_a_slot_reply_from_before_a_newer_head_record_is_ignored():
    b = Told()
    b.slot(101, "1.1")
    first = b.head(103, "1.2")
    b.head(104, "1.2", state="ENDED", number=1)
    assert not actions_of(m.Announce, b.answer(first, 103, None))
    again = b.head(106, "1.3", number=2)
    assert actions_of(m.Announce, b.answer(again, 106, b.slot_entry(101, "1.1")))


def test_an_agent_that_starts_workers_is_not_called_a_spare():
    b = Told()
    asked = b.head(102, "1.1")
    assert not actions_of(m.Announce, asked)
    told = b.answer(asked, 102, b.slot_entry(101, "1.1"))
    assert actions_of(m.Start, told)
    assert not actions_of(m.Announce, told)


def test_an_agent_without_a_slot_is_called_a_spare():
    b = Told()
    (line,) = actions_of(m.Announce, b.answer(b.head(102, "1.1"), 102, None))
    says(line.text, "spare", "round 1", "3 nodes")


def test_workers_are_stopped_if_the_end_of_their_round_was_not_reported():
    b = Told()
    b.slot(101, "1.1")
    b.head(102, "1.1")
    (stop,) = actions_of(m.Stop, b.head(105, "1.2", number=2))
    assert stop.round == 1
    says(stop.why, "more nodes")


def test_the_leader_has_a_single_watch():
    cluster, (a, b) = running(2)
    assert list(a.conn.watches) == [(cluster.keys.prefix, False)]
    assert len(a.all(Unwatch)) == 3
    watched = {each.prefix for each in b.all(Watch)}
    assert len(watched) == len(b.all(Watch)) == 4, "no key twice"
    a.kill()
    assert list(b.conn.watches) == [(cluster.keys.prefix, False)]
