"""Job records that another program overwrites cause no exceptions, wrong ranks or false successes."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.nodes.protocol import messages as m
from elasticrs._engine.nodes.protocol import records
from elasticrs._engine.nodes.protocol.records import DamagedError, Head, Node, Slot, encode
from elasticrs._engine.nodes.transport.coordination import Put
from rendezvous.cluster import Cluster, end_all, ends, joined, running

READERS = {
    "head": Head.decode,
    "slot": Slot.decode,
    "nodes": Node.decode,
    "table": records.table_of,
    "rank": records.holder_of,
    "job": records.job_of,
    "done": records.check_done,
}
CAUSE = {"node": "a", "rank": 1, "local_rank": 1, "pid": 7, "exitcode": -9, "time_ns": 5, "silence": 1.5}
END = {"kind": "failure", "node": "a", "group_rank": 0, "message": "boom", "fatal": False, "charged": True}
VALID = {
    "head": Head("RUNNING", 1, "1.1", 0, 1, 1, ("h", 1), END, CAUSE).encode(),
    "slot": Slot(1, "1.1", 0, 0, 0, 1).encode(),
    "nodes": Node("a", "a", "10.0.0.1", "default", 1, 4000, cause=CAUSE).encode(),
    "table": encode([("01/1", "a", "10.0.0.1")]),
    "rank": encode(["01", "01/1", "a (10.0.0.1)"]),
    "job": encode({"protocol": 1, "node": "a"}),
    "done": b"{}",
}
HUGE = (-1, 2**31, 2**64, 10**400, 1e308, 1e999, -0.5, math.nan, math.inf, -math.inf)

numbers = st.integers() | st.floats() | st.sampled_from(HUGE)
leaves = st.none() | st.booleans() | numbers | st.text(st.characters()) | st.sampled_from(["\x00", "\ud800"])
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
)


def in_json(value):
    return json.dumps(value).encode("ascii")


@st.composite
def nearly(draw, kind):
    """A valid record in which one value, at any depth, is replaced or left out."""
    record = json.loads(VALID[kind])
    place = record
    while True:
        if not isinstance(place, (dict, list)) or not place:
            return in_json(draw(trees))
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = draw(st.sampled_from(list(keys)))
        if isinstance(place[key], (dict, list)) and place[key] and draw(st.booleans()):
            place = place[key]
            continue
        if draw(st.booleans()):
            place[key] = draw(trees)
        else:
            del place[key]
        return in_json(record)


depths = st.sampled_from([b"[", b'{"a":']).map(lambda opening: opening * 100_000)
raw = st.binary(max_size=200) | trees.map(in_json) | depths


kinds_and_values = st.sampled_from(sorted(READERS)).flatmap(
    lambda kind: st.tuples(st.just(kind), raw | nearly(kind))
)


@given(kinds_and_values)
def test_any_bytes_are_decoded_or_reported_as_damaged(kind_and_value):
    kind, value = kind_and_value
    wrong = ""
    try:
        record = READERS[kind](value)
    except DamagedError as error:
        record, wrong = None, str(error)
    assert len(wrong) < 300
    assert wrong.isprintable()
    if isinstance(record, (Head, Node, Slot)):
        again = type(record).decode(record.encode())
        assert type(again) is type(record)
    if isinstance(record, Head):
        assert all(
            type(getattr(record, name)) is int for name in ("round", "used", "size", "world_size", "losses")
        )
        assert record.state in ("RUNNING", "ENDED", "CLOSED")
        records.blame_of(record.cause), records.silence_of(record.cause), records.time_of(record.cause)


@pytest.mark.parametrize("round_", [1e308, 10**400, -1, "1", None, True, [1]])
def test_an_invalid_round_number_is_reported_as_damaged(round_):
    head = {**json.loads(VALID["head"]), "round": round_}
    with pytest.raises(DamagedError):
        Head.decode(in_json(head))


def write(cluster, key, value):
    cluster.store.apply([Put(key, value, False)], None)
    cluster.run()


def test_a_damaged_head_record_fails_the_job_on_all_nodes():
    cluster, (a, b) = running(2, max_restarts=3)
    write(cluster, cluster.keys.head, b"\xff")
    end_all([a, b])
    for agent in (a, b):
        ends(agent.outcome, "failed", cluster.keys.head)
    late = cluster.add("c")
    ends(late.outcome, "closed", cluster.keys.head)


def test_a_job_with_a_damaged_head_record_can_be_closed():
    cluster, (a, b) = running(2)
    b.conn.watches.clear()
    a.conn.watches.clear()
    write(cluster, cluster.keys.head, b"[]")
    a.send(m.Leave("SIGTERM", close=True))
    a.send(m.GroupEnded())
    assert cluster.keys.head in a.outcome.message


@pytest.mark.parametrize("record", ["slot", "registration"])
def test_a_running_node_with_a_damaged_record_stays_in_the_job(record):
    cluster, (a, b) = running(2, max_restarts=1)
    # Each node reads its own slot (the record of its ranks). Only the leader reads the nodes' registrations.
    key, reader = (cluster.keys.slot(b.member.link.member), b) if record == "slot" else (b.key, a)
    write(cluster, key, b"\xff" if record == "slot" else b'{"nproc": "many"}')
    assert any(key in text for text in reader.texts)
    assert not reader.all(m.Stop)
    a.fail(end=False)
    end_all([a, b])
    assert [start.round for start in b.starts] == [1, 2]
    assert b.starts[1].restarts == 1


@pytest.mark.parametrize("slot", [b"\xff", b'[1,"FORM",5,5,0,2]', b'[1,"FORM",1,1,0,1e308]'])
def test_a_node_with_a_damaged_slot_record_before_the_start_joins_again(slot):
    cluster, (a,) = joined(1, needs=2)
    apply, forms = cluster.store.apply, []

    def damage(op):
        if not isinstance(op, Put) or "/slot/02" not in op.key or forms:
            return op
        forms.append(json.loads(op.value)[1].encode())
        return op.replaced(value=slot.replace(b"FORM", forms[0]))

    cluster.store.apply = lambda ops, conn: apply([damage(op) for op in ops], conn)
    b = cluster.add("b")
    assert forms
    end_all([a])
    b.fire("reconnect")
    assert [start.group_rank for start in b.starts] == [1]
    assert b.member.link.member.endswith("/2")
    assert b.starts[0].ranks.first_rank == 1
    assert a.starts[-1].round == b.starts[0].round == 2


def test_a_new_leader_waits_for_a_node_with_a_damaged_registration():
    cluster, (a, b, c) = joined(3, needs=(2, 3), last_call_timeout=1)
    assert len(c.starts) == 1
    write(cluster, c.key, b"\xff")
    a.kill()
    b.send(m.GroupEnded())
    assert cluster.head.state == "ENDED"
    assert len(b.starts) == 1, "c still has workers"
    c.send(m.GroupEnded())
    assert [start.round for start in c.starts] == [1, 2]
    assert {start.ranks.first_rank for start in (b.starts[-1], c.starts[-1])} == {0, 1}


def test_the_loss_of_a_node_with_an_overwritten_registration_is_detected():
    cluster, (_, b) = running(2, max_restarts=1)
    write(cluster, b.key, b"\xff")
    b.kill()
    assert cluster.head.end["kind"] == "lost"


@pytest.mark.parametrize("name", ["junk", "a/b", "a/", "x/-1", "x/\N{DEVANAGARI DIGIT ONE}", "x/1e3"])
@pytest.mark.parametrize("kind", ["nodes", "slots", "dones", "tables", "farewells"])
def test_records_with_invalid_key_names_are_ignored(kind, name):
    cluster = Cluster(min_nodes=2, max_nodes=2)
    cluster.store.apply([Put(getattr(cluster.keys, kind) + name, b"\xff", False)], None)
    a, b = cluster.add("a"), cluster.add("b")
    assert [len(a.starts), len(b.starts)] == [1, 1]
    b.kill()
    a.send(m.GroupEnded())
    assert cluster.add("c").starts[0].round == 2


@pytest.mark.parametrize("name", ["1/1", "1/7", "1/-1", "1/01", "x/y", "1"])
def test_an_invalid_done_record_does_not_count_as_success(name):
    cluster, (a, b) = running(2)
    value = b"\xff" if name == "1/1" else b"{}"
    write(cluster, cluster.keys.dones + name, value)
    a.send(m.WorkersDone())
    assert cluster.head.state == "RUNNING"
    b.send(m.WorkersDone())
    assert (a.outcome.kind, b.outcome.kind) == ("succeeded", "succeeded")


def test_an_overwritten_done_record_still_counts_as_success():
    cluster, (a, b) = running(2)
    b.send(m.WorkersDone())
    write(cluster, cluster.keys.done(1, 1), b"\xff")
    a.send(m.WorkersDone())
    assert (a.outcome.kind, b.outcome.kind) == ("succeeded", "succeeded")


def test_an_overwritten_round_table_is_ignored():
    cluster, (_, b) = running(2, max_restarts=1)
    (key,) = [key for key in cluster.store.entries if key.startswith(cluster.keys.tables)]
    write(cluster, key, encode([("77/1", "x", "10.9.9.9")]))
    b.kill()
    assert cluster.head.end["node"] == "b"


@pytest.mark.parametrize("value", [b"\xff", encode([["77/1", "x", "y"]]), encode([["01/1", "x"]])])
def test_a_new_leader_with_a_damaged_round_table_fails_the_job(value):
    cluster, (a, b, c) = joined(3, needs=(2, 3), last_call_timeout=1)
    (key,) = [key for key in cluster.store.entries if key.startswith(cluster.keys.tables)]
    write(cluster, key, value)
    a.kill()
    end_all([b, c])
    for agent in (b, c):
        ends(agent.outcome, "failed", cluster.keys.tables)


def test_a_joining_node_is_refused_if_the_job_record_is_damaged():
    cluster, _ = joined(1, needs=(1, 2))
    write(cluster, cluster.keys.job, b"[[1]]")
    b = cluster.add("b")
    ends(b.outcome, "refused", cluster.keys.job)


def test_a_damaged_node_rank_record_counts_as_taken():
    cluster = Cluster(min_nodes=2, max_nodes=2, node_rank=0, order_hint=0, backend="static", port=29500)
    cluster.store.apply([Put(cluster.keys.rank(0), b"\xff", False)], None)
    a = cluster.add("a")
    for _ in range(3):
        a.fire("reconnect")
    a.fire("rank")
    ends(a.outcome, "refused", cluster.keys.rank(0))


happenings = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 30), kinds_and_values),
    st.tuples(st.sampled_from(["fail", "done", "ended", "kill", "add"]), st.integers(0, 2)),
    st.tuples(st.just("junk"), st.sampled_from(sorted(READERS)), st.text(max_size=6), raw),
)


@given(st.lists(happenings, max_size=12))
def test_no_damage_raises_an_exception_or_assigns_a_rank_twice(course):
    cluster, agents = joined(3, needs=(2, 3), max_restarts=2, last_call_timeout=1)
    for what, *rest in course:
        agent = agents[rest[0]] if isinstance(rest[0], int) and rest[0] < len(agents) else agents[0]
        is_there = agent in cluster.agents and agent.outcome is None
        if what == "write":
            keys = sorted(cluster.store.entries)
            kind, value = rest[1]
            same = [key for key in keys if key.split("/")[3] == kind] or keys
            write(cluster, same[rest[0] % len(same)], value)
        elif what == "junk":
            write(cluster, f"{cluster.keys.prefix}{rest[0]}/{rest[1]}", rest[2])
        elif what == "add" and len(agents) < 6:
            agents.append(cluster.add("defghi"[len(agents) - 3]))
        elif what == "kill" and is_there:
            agent.kill()
        elif is_there and agent.member.workers is not None:
            if what == "fail":
                agent.fail(end=False)
            else:
                agent.send(m.WorkersDone() if what == "done" else m.GroupEnded())
        by_form = {}
        for each in agents:
            for start in each.starts:
                by_form.setdefault((start.round, start.master_port, start.restarts), []).append(start)
        for starts in by_form.values():
            ranks = [start.ranks.first_rank for start in starts]
            assert len(set(ranks)) == len(ranks), starts
