"""VIEW-2: the view that the leader updates with each change equals a view computed from all keys."""

from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.nodes.protocol.keys import Keys
from elasticrs._engine.nodes.protocol.leader_view import View
from elasticrs._engine.nodes.protocol.records import Head, Node, Slot, encode
from rendezvous.store import Entry

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


def node(idle):
    return Node("n", "h", "10.0.0.1", "default", 1, 4000, idle).encode()


def table(order):
    return encode([(member, "n", "10.0.0.1") for member in order])


writes = st.one_of(
    st.tuples(members.map(KEYS.node), rounds.map(node) | st.none()),
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
