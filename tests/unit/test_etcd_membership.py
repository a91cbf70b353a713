"""Decisions of a node that hosts an etcd member: examples, and a simulation with lost agents and data."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticrs.rendezvous.elastic.etcd_membership import (
    Adopt,
    Create,
    Entry,
    Lost,
    Refuse,
    Seat,
    Stay,
    View,
    Wait,
    cluster_token,
    initial_cluster,
    label_of,
    majority,
    name_of,
    next_step,
)

LABEL = label_of("job", "/p", None)
LONG = 60.0
"""Seconds after which every seat may create a cluster."""


def seats(count):
    return tuple(Seat(f"n{index}", 2379, 2380) for index in range(count))


def listed(incarnation, joined=(), count=3, label=LABEL):
    """Return the member list that an etcd member sends. The members of the seats ``joined`` have joined the
    cluster.
    """
    return tuple(
        Entry(name_of(label, incarnation, index), (seat.peer_url,), has_joined=index in joined)
        for index, seat in enumerate(seats(count))
    )


def step(*answers, mine=0, waited=LONG, **more):
    return next_step(View(seats(len(answers)), mine, LABEL, answers, waited=waited, **more))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ((None, None, None), Create()),
        # One or more other seats are forming a cluster.
        ((None, listed("a"), None), Adopt("a")),
        ((None, listed("a"), listed("b")), Adopt("b")),
        # A majority belongs to a cluster in which this seat never had a member.
        ((None, listed("a", {1, 2}), listed("a", {1, 2})), Adopt("a")),
        # A single seat with data of a cluster is not enough, because this seat may have joined that cluster
        # later.
        ((None, listed("a", {1, 2}), None), Wait()),
        # This seat has lost its data, and the other seats are a majority.
        ((None, listed("a", {0, 1, 2}), listed("a", {1, 2})), Lost(2)),
        # A majority has lost its data, or the other seat has data of an earlier run.
        ((None, listed("a", {0, 1, 2}), None), Create()),
        ((None, listed("a", {0, 1, 2}), listed("b")), Adopt("b")),
    ],
)
def test_a_member_without_data_creates_or_adopts_a_cluster_or_waits(answers, expected):
    assert step(*answers) == expected


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ((listed("b"), None, None), Stay()),
        ((None, None, None), Stay()),
        ((listed("b"), listed("a"), None), Stay()),
        ((listed("b"), listed("c"), None), Adopt("c")),
        # A majority has this seat's incarnation, so this seat stays, and the third seat will adopt it.
        ((listed("b"), listed("b"), listed("c")), Stay()),
        # This seat stays, because its cluster has a quorum.
        ((listed("b", {1}), None, listed("c")), Stay()),
        ((listed("b"), listed("b", {1}), listed("c")), Stay()),
        ((listed("b"), listed("a", {1, 2}), listed("a", {1, 2})), Adopt("a")),
        ((listed("b"), listed("a", {0, 1, 2}), listed("a", {0, 1, 2})), Lost(2)),
    ],
)
def test_a_member_that_has_not_joined_stays_or_adopts_another_cluster(answers, expected):
    assert step(*answers, held="b") == expected


def test_a_member_that_has_joined_stays_in_its_cluster():
    others = [(None, None, None), (None, listed("c"), None), (None, listed("b", {0, 1}), listed("c", {2}))]
    for answers in others:
        assert step(*answers, held="b", has_joined=True) == Stay()


def test_a_member_adopts_the_cluster_that_has_the_majority():
    assert step(None, listed("a"), listed("a"), held="b", has_joined=True) == Adopt("a")
    assert step(None, listed("a", {1, 2}), listed("a"), held="b", has_joined=True) == Adopt("a")


def test_only_the_first_member_creates_a_cluster_without_waiting():
    assert step(None, None, None, waited=0.0) == Create()
    assert step(None, None, None, mine=1, waited=0.1) == Wait()
    assert step(None, listed("a"), None, mine=2, waited=0.1) == Adopt("a")


def test_a_single_member_does_not_wait():
    assert step(None, waited=0.0) == Create()
    assert step(None, held="a", has_joined=True) == Stay()


@pytest.mark.parametrize("name", ["default", "", f"{LABEL}-0", name_of(label_of("k", "/p", None), "a", 1)])
def test_an_etcd_member_of_another_job_is_refused(name):
    found = step(None, (Entry(name, ("http://n1:2380",), has_joined=True),), None)
    assert isinstance(found, Refuse)
    assert "n1:2380" in found.why


def test_a_member_with_a_different_endpoint_list_is_refused():
    strange = Entry(name_of(LABEL, "a", 2), ("http://m2:2380",), has_joined=False)
    found = step(None, (*listed("a")[:2], strange), None)
    assert isinstance(found, Refuse)
    assert re.search(r"n1:2380 .*http://m2:2380", found.why)


def test_cluster_labels_differ_by_job_prefix_and_token():
    labels = {label_of("j", "/p", None), label_of("j", "/q", None), label_of("k", "/p", None)}
    labels |= {label_of("j", "/p", b"secret"), label_of("j", "/p", b"secret2")}
    assert len(labels) == 5
    assert all("secret" not in label for label in labels)


def test_the_initial_cluster_names_all_members():
    assert initial_cluster(seats(2), LABEL, "a") == (f"{LABEL}-a-0=http://n0:2380,{LABEL}-a-1=http://n1:2380")
    assert cluster_token(LABEL, "a") != cluster_token(LABEL, "b")


# --- simulation ---


class World:
    """A simulation of seats and their data, of agents that start and die, and of network failures.

    Each start without data begins a new *life* of a member. Once a member has been part of a quorum, it may
    have acknowledged writes that only its current life knows.
    """

    def __init__(self, count):
        self.seats, self.count = seats(count), count
        self.data = {}
        """Incarnation and number of the current life, by seat."""
        self.up, self.cut = set(), set()
        self.lost = set()
        """Seats whose hosts run no member until their agents are started again."""
        self.joined = {}
        """Life of each seat that has joined, by incarnation."""
        self.numbers = 0
        self.broken = False
        """True if too many seats have lost their data for any cluster to survive."""

    def reaches(self, one, other):
        return one == other or not {one, other} & self.cut

    def members(self, incarnation, start):
        """Return the running members of an incarnation that the seat ``start`` can reach."""
        return {
            index
            for index in self.up
            if index in self.data and self.data[index][0] == incarnation and self.reaches(start, index)
        }

    def answer(self, index):
        incarnation = self.data[index][0]
        return listed(incarnation, set(self.joined.get(incarnation, ())), self.count)

    def view(self, index):
        answers = [
            self.answer(other)
            if other in self.up and other in self.data and self.reaches(index, other)
            else None
            for other in range(self.count)
        ]
        held, life = self.data.get(index, (None, 0))
        has_joined = held is not None and self.joined.get(held, {}).get(index) == life
        return View(self.seats, index, LABEL, answers, held, has_joined, LONG)

    def act(self, index):
        if index not in self.up or index in self.lost:
            return
        chosen = next_step(self.view(index))
        if isinstance(chosen, Adopt | Lost) and index in self.data:
            held, life = self.data.pop(index)
            if self.joined.get(held, {}).get(index) == life:
                self.check_dead(held, index)
        if isinstance(chosen, Adopt):
            self.start(index, chosen.incarnation)
        elif isinstance(chosen, Create):
            self.numbers += 1
            self.start(index, f"{self.numbers * 7919 % 1000:03}")
        elif isinstance(chosen, Lost):
            self.lost.add(index)

    def check_dead(self, incarnation, index):
        """Check that a seat discards its data of this cluster only if too few seats hold such data for a
        quorum.
        """
        holders = {seat for seat, (each, _) in self.data.items() if each == incarnation} | {index}
        assert len(holders) < majority(self.seats), "data that a quorum needs were discarded"

    def start(self, index, incarnation):
        assert index not in self.joined.get(incarnation, {}), "a member without its data was started again"
        self.numbers += 1
        self.data[index] = (incarnation, self.numbers)

    def elect(self, index):
        """Let the members that this seat can reach join the cluster if they are a majority."""
        if index not in self.up or index not in self.data:
            return
        incarnation = self.data[index][0]
        members = self.members(incarnation, index)
        if len(members) >= majority(self.seats):
            known = self.joined.setdefault(incarnation, {})
            for each in members:
                life = self.data[each][1]
                assert known.setdefault(each, life) == life, "two lives of a member"

    def come(self, index):
        self.up.add(index)

    def die(self, index):
        self.up.discard(index)
        self.lost.discard(index)
        held, life = self.data.get(index, (None, 0))
        if held is not None and self.joined.get(held, {}).get(index) != life:
            # The data of a member that has not joined a cluster are useless.
            del self.data[index]

    def wipe(self, index):
        self.die(index)
        self.data.pop(index, None)

    def toggle(self, index):
        self.cut ^= {index}

    def settle(self):
        for _ in range(2 * self.count):
            for index in range(self.count):
                self.act(index)
                self.elect(index)


ACTS = ("come", "come", "act", "act", "act", "elect", "elect", "die", "toggle", "wipe")


@settings(deadline=None)
@given(st.sampled_from([1, 3, 5]), st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 4)), max_size=80))
@example(3, [("come", 0), ("come", 1), ("act", 0), ("act", 1), ("elect", 0), ("wipe", 0), ("come", 0)])
def test_lost_data_never_lead_to_two_clusters_with_a_quorum(count, acts):
    world = World(count)
    for act, index in acts:
        getattr(world, act)(index % count)
    # At most one cluster has a quorum. Each incarnation has only one life of each seat (see `elect`), and a
    # seat belongs to one incarnation at a time.
    world.cut.clear()
    world.settle()
    alive = {
        each
        for each, known in world.joined.items()
        if sum(world.data.get(seat) == (each, life) for seat, life in known.items()) >= majority(world.seats)
    }
    assert len(alive) <= 1


@settings(deadline=None)
@given(
    st.sampled_from([1, 3, 5]),
    st.lists(st.tuples(st.sampled_from(ACTS[:-1]), st.integers(0, 4)), max_size=80),
)
def test_without_data_loss_all_members_join_one_cluster(count, acts):
    world = World(count)
    for act, index in acts:
        getattr(world, act)(index % count)
    world.cut.clear()
    for index in range(count):
        world.come(index)
    world.settle()
    assert len({each for each, _ in world.data.values()}) == 1
    assert len(world.data) == count
    assert not world.lost


@settings(deadline=None)
@given(st.sampled_from([3, 5]), st.data())
def test_members_form_a_new_cluster_only_if_a_majority_has_lost_its_data(count, data):
    world = World(count)
    for index in range(count):
        world.come(index)
    world.settle()
    (before,) = world.joined
    wiped = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    for index in range(count):
        world.die(index)
    for index in wiped:
        world.wipe(index)
    for index in data.draw(st.permutations(range(count))):
        world.come(index)
        world.act(index)
        world.elect(index)
    world.settle()
    found = {each for each, _ in world.data.values()}
    if count - len(wiped) >= majority(world.seats):
        # The seats with data continue in the same cluster. The seats without data do not join it.
        assert found == {before}
        assert world.lost == wiped
    else:
        assert len(found) == 1
        assert before not in found
        assert len(world.data) == count
