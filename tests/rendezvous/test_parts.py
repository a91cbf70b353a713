"""Pure functions for seats, addresses and records, with their properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.job.config import MAX_IN_WINDOW
from elasticrs._engine.job.restart_policy import FailureHistory
from elasticrs._engine.nodes.protocol.formation import Candidate, assign_seats, natural
from elasticrs._engine.nodes.protocol.leader_view import View
from elasticrs._engine.nodes.protocol.records import (
    MAX_CAUSE,
    MAX_HEAD,
    Head,
    Keys,
    Node,
    Slot,
    bound_cause,
    cut,
    encode,
    master_addr,
)
from elasticrs._engine.workers.plan import NodeShare, assign, node_ranks
from rendezvous.store import Entry

names = st.text(alphabet="node0129-.", max_size=6)
shares = st.lists(
    st.builds(NodeShare, st.sampled_from(["trainer", "reader"]), st.integers(1, 5)), min_size=1, max_size=8
)


@st.composite
def offers(draw):
    agents = draw(st.lists(st.integers(0, 15).map(str), unique=True, max_size=10))
    joined = draw(st.permutations(range(len(agents))))
    return [
        Candidate(agent, joined[index], draw(st.none() | st.integers(0, 3)), draw(names))
        for index, agent in enumerate(agents)
    ]


previous = st.lists(st.integers(0, 15).map(str), unique=True, max_size=10)


@given(previous, offers(), st.integers(1, 12))
def test_each_candidate_gets_at_most_one_rank(last, candidates, size):
    seats = assign_seats(last, candidates, size)
    assert len(set(seats)) == len(seats) == min(size, len(candidates))
    assert set(seats) <= {each.agent for each in candidates}


@given(previous, offers())
def test_surviving_nodes_keep_their_ranks_if_the_size_is_unchanged(last, candidates):
    size = len(last)
    seats = assign_seats(last, candidates, max(size, 1))
    if len(seats) == size:
        offered = {each.agent for each in candidates}
        assert all(seats[rank] == agent for rank, agent in enumerate(last) if agent in offered)


@given(previous, offers(), st.integers(1, 12))
def test_surviving_nodes_keep_their_order_and_are_preferred_to_new_nodes(last, candidates, size):
    seats = assign_seats(last, candidates, size)
    offered = {each.agent for each in candidates}
    stay = [agent for agent in last if agent in offered][:size]
    assert [agent for agent in seats if agent in stay] == stay


@given(offers(), st.randoms(use_true_random=False))
def test_ranks_do_not_depend_on_the_order_of_the_candidates(candidates, random):
    mixed = list(candidates)
    random.shuffle(mixed)
    assert assign_seats([], mixed, 5) == assign_seats([], candidates, 5)


@pytest.mark.parametrize(
    ("offered", "seats"),
    [
        ([("a", 0, None, "node10"), ("b", 1, None, "node2"), ("c", 2, None, "node1")], "cba"),
        ([("a", 0, None, "n1"), ("b", 1, 1, "n3"), ("c", 2, 0, "n4")], "cba"),
        ([("a", 9, None, "n1"), ("b", 1, None, "n3"), ("c", 2, None, "n2")], "cb"),
    ],
    ids=["natural order of names", "order hint before name", "first to arrive"],
)
def test_new_nodes_are_chosen_by_arrival_and_sorted_by_hint_and_name(offered, seats):
    assert assign_seats([], [Candidate(*each) for each in offered], len(seats)) == list(seats)


@given(names, names)
def test_natural_order_is_total(left, right):
    assert (natural(left) < natural(right)) + (natural(right) < natural(left)) == (
        natural(left) != natural(right)
    )
    assert (natural(left) == natural(right)) == (left == right)


@given(shares)
def test_node_ranks_agree_with_the_ranks_of_workers(nodes):
    ranks = node_ranks(nodes)
    workers = [worker for rank, node in enumerate(nodes) for worker in ranks[rank].workers(node)]
    assert workers == [worker for rank in range(len(nodes)) for worker in assign(nodes, rank)]
    assert [worker.global_rank for worker in workers] == list(range(len(workers)))
    for role in {node.role for node in nodes}:
        mine = [worker.role_rank for worker in workers if worker.role == role]
        assert mine == list(range(len(mine)))


def node(address, host="h1", **differs):
    return Node("n", host, address, "default", 1, 4000, **differs)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node("10.0.0.1")], "10.0.0.1"),
        ([node("127.0.0.1")], "127.0.0.1"),
        ([node("127.0.0.1", fallback_addr="head")], "127.0.0.1"),
        ([node("127.0.0.1", fallback_addr="head"), node("10.0.0.2", "h2")], "head"),
        ([node("::1", fallback_addr="head"), node("fe80::2", "h2")], "head"),
        ([node("127.0.0.1", local_addr="10.1.1.1"), node("10.0.0.2", "h2")], "10.1.1.1"),
        ([node("127.0.0.1", fallback_addr="head"), node("127.0.0.1")], "127.0.0.1"),
    ],
)
def test_the_master_address_is_reachable_by_all_nodes(nodes, expected):
    assert master_addr(nodes) == expected


texts = st.text(max_size=3000)
causes = st.dictionaries(
    st.sampled_from(["node", "message", "lines", "time_ns", "rank", "odd"]),
    texts | st.integers(0, 2**63) | st.lists(texts, max_size=5),
)


@given(causes)
def test_the_size_of_a_failure_cause_is_limited(cause):
    bounded = bound_cause(cause)
    assert len(encode(bounded)) <= MAX_CAUSE
    if len(encode(cause)) <= 300:
        assert bounded == cause
    assert bounded.get("time_ns") == cause.get("time_ns") or not isinstance(cause["time_ns"], int)


as_written = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("node", "message", "odd"), texts),
        **dict.fromkeys(("time_ns", "rank"), st.integers(0, 2**53 - 1)),
        "lines": st.lists(texts, max_size=5),
    },
)


@given(as_written, texts, texts, texts)
def test_a_head_record_is_limited_in_size_and_decodes_to_the_same_data(cause, reason, message, name):
    head = Head(
        "CLOSED",
        2**31,
        "9" * 30,
        used=99,
        size=10**6,
        world_size=10**8,
        master=("h" * 255, 65535),
        reason=reason,
        cause=cause,
        outcome="failed",
        end={"kind": "failure", "node": name, "message": message, "member": "f" * 30, "group_rank": 10**6},
    )
    full = FailureHistory(
        charged=2**53 - 1,
        charged_at=tuple(1e10 + index + 0.123 for index in range(MAX_IN_WINDOW)),
        last=(name, reason, 2**53 - 1, 2**53 - 1),
        same=2**31,
        reached=2**53 - 1,
        without_progress=2**31,
    )
    value = head.with_failures(full).encode()
    assert len(value) <= MAX_HEAD
    decoded = Head.decode(value)
    assert decoded.encode() == value
    assert decoded.failures.charged_at == full.charged_at


@given(texts, st.integers(10, 500))
def test_a_cut_text_fits_its_size_limit(text, limit):
    assert len(encode(cut(text, limit))) <= limit + 4


def test_records_are_decoded_as_they_were_encoded():
    slot = Slot(3, "7.1", 2, 8, 4, 16)
    assert Slot.decode(slot.encode()) == slot
    full = node("10.0.0.1", fallback_addr="head", hint=0, cause={"time_ns": 1})
    assert Node.decode(full.encode()) == full


def test_the_keys_of_different_jobs_do_not_overlap():
    assert not Keys("a/b").job.startswith(Keys("a").prefix)
    assert Keys("a%2Fb").job != Keys("a/b").job


# --- VIEW-2: the leader updates its view with each change, and it equals a view computed from all keys ---


KEYS = Keys("job")
MEMBERS = [f"{agent}/{incarnation}" for agent in "abc" for incarnation in (1, 2)]
DERIVED = (
    "absent",
    "missing",
    "slow",
    "candidates",
    "waiting",
    "done",
    "farewells",
    "rank_of",
    "slots",
    "joined",
)

members = st.sampled_from(MEMBERS)
rounds = st.integers(0, 3)


def registration(idle):
    return Node("n", "h", "10.0.0.1", "default", 1, 4000, idle).encode()


def table(order):
    return encode([(member, "n", "10.0.0.1") for member in order])


writes = st.one_of(
    st.tuples(members.map(KEYS.node), rounds.map(registration) | st.none()),
    st.tuples(members.map(KEYS.slot), rounds.map(lambda n: Slot(n, "1.1", 0, 0, 0, 1).encode()) | st.none()),
    st.tuples(members.map(KEYS.farewell), st.just(b'"bye"') | st.none()),
    st.tuples(st.builds(KEYS.done, rounds, st.integers(0, 2)), st.just(b"{}") | st.none()),
    st.tuples(
        st.just(KEYS.head),
        st.builds(Head, st.sampled_from(["RUNNING", "ENDED"]), rounds, st.sampled_from(["f", "g"])).map(
            Head.encode
        ),
    ),
)
# A transaction writes each key once.
batches = st.lists(writes, min_size=1, max_size=3, unique_by=lambda write: write[0])
tables = st.lists(st.lists(members, unique=True, min_size=1, max_size=3), min_size=2, max_size=2)


@given(tables, st.lists(batches, max_size=30))
def test_an_updated_view_equals_a_newly_computed_view(orders, revisions):
    store = {
        f"{KEYS.table(form)}0": Entry(f"{KEYS.table(form)}0", table(order), 1, 1)
        for form, order in zip("fg", orders, strict=True)
    }
    view = View(KEYS, 1, store.values())
    for revision, batch in enumerate(revisions, 2):
        changes = []
        for key, value in batch:
            old = store.pop(key, None)
            if value is None:
                changes.append(Entry(key, None, 0, revision))
            else:
                store[key] = Entry(key, value, old.create_revision if old else revision, revision)
                changes.append(store[key])
        view.apply(revision, changes)
        fresh = View(KEYS, revision, store.values())
        for name in DERIVED:
            assert getattr(view, name) == getattr(fresh, name), name
