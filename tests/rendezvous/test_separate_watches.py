"""A store that reports each watch separately, as etcd does, so that one watch may be ahead of another."""

import pytest
from helpers.said import says

from elasticrs._engine.nodes.protocol import messages as m
from elasticrs._engine.nodes.protocol.machine import step
from elasticrs._engine.nodes.protocol.records import Head, Slot
from elasticrs._engine.nodes.transport.coordination import Changes, Get, Put, Reply, Txn, Unwatch, Watch
from rendezvous.cluster import Cluster, running
from rendezvous.store import Entry


class Told:
    """An agent that has joined and waits. The test decides what its watches report."""

    def __init__(self):
        cluster = Cluster(min_nodes=3, max_nodes=3)
        cluster.add("a")
        self.member = cluster.add("b").member
        self.head_key = cluster.keys.head
        self.slot_key = cluster.keys.slot(self.member.registration.member)

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
    """Return the keys with which the agent reports that it is idle."""
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
