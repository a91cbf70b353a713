"""The decisions of a host of etcd: examples, and a world of seats that die and come back."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticrs.rendezvous.elastic.etcd_membership import (
    Add,
    Belongs,
    Bootstrap,
    Entry,
    Out,
    Promote,
    Refuse,
    Remove,
    Seat,
    StartOver,
    View,
    Wait,
    heirs,
    initial_cluster,
    label_of,
    learner_name,
    name_of,
    next_step,
    next_step_out,
)

LABEL = label_of("job", "/p", None)


def seats(count):
    return tuple(Seat(f"n{index}", 2379, 2380) for index in range(count))


def entry(index, number=None, *, published=True, learner=False, label=LABEL, host=None):
    name = "" if learner and not published else f"{label}-{index}"
    url = f"http://{host or f'n{index}'}:2380"
    return Entry(
        index if number is None else number, name, (url,), has_published=published, is_learner=learner
    )


ALL = tuple(entry(index) for index in range(3))
FORMING = tuple(entry(index, published=False) for index in range(3))


def step(*answers, mine=0, **more):
    return next_step(View(seats(3), mine, LABEL, answers, **more))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ((None, None, None), Bootstrap()),
        ((None, FORMING, None), Bootstrap()),
        # The cluster is there, and waits for this seat.
        ((None, (FORMING[0], *ALL[1:]), None), Bootstrap()),
        # The others do without it: it may have voted.
        ((None, (FORMING[0], *ALL[1:]), (FORMING[0], *ALL[1:])), Remove(0)),
        # It was here before, whatever others have heard of that.
        ((None, FORMING, ALL), Remove(0)),
        ((None, ALL, None), Remove(0)),
        # It was a learner.
        ((None, (*ALL[1:], entry(0, 9, published=False, learner=True)), None), Remove(9)),
        ((None, ALL[1:], ALL[1:]), Add()),
        # Somebody else is about to come.
        ((None, ALL[1:2], (*ALL[1:2], entry(2, 9, learner=True))), Wait()),
    ],
)
def test_the_first_steps(answers, expected):
    assert step(*answers) == expected


def test_a_seat_that_may_have_voted_does_not_come_again_as_the_same():
    assert step(None, (FORMING[0], *ALL[1:]), None, has_voted=True) == Remove(0)
    assert step(None, FORMING, None, has_voted=True) == Bootstrap()


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        # Its own member runs, and has answered as well.
        ((ALL, ALL, ALL), Remove(0)),
        ((ALL, None, ALL), Remove(1)),
        (((ALL[0], ALL[2]), None, ALL), Remove(0)),
        ((ALL[:1], None, None), Out()),
        ((ALL[1:], None, ALL[1:]), Out()),
        ((ALL, None, None), Wait()),
        # It does not run any more.
        ((None, ALL, ALL), Remove(0)),
        ((None, ALL, None), Wait()),
        ((None, FORMING, FORMING), Wait()),
        ((None, ALL[1:], ALL[1:]), Out()),
        ((None, (*ALL[1:], entry(0, 9, learner=True)), ALL[1:]), Remove(9)),
        ((None, None, None), Wait()),
    ],
)
def test_the_way_out(answers, expected):
    assert next_step_out(View(seats(3), 0, LABEL, answers)) == expected


def test_who_leaves_does_not_remove_who_may_only_be_slow():
    view = View(seats(3), 0, LABEL, (ALL, None, ALL), hidden=frozenset([1]))
    assert next_step_out(view) == Remove(0)


def test_who_leaves_does_not_mind_an_etcd_of_somebody_else():
    strange = (entry(1, label="default"),)
    assert next_step_out(View(seats(3), 0, LABEL, (ALL, strange, ALL))) == Remove(1)
    assert next_step_out(View(seats(3), 0, LABEL, (FORMING, strange, None))) == Out()


STARTING = tuple(
    Entry(index, learner_name(LABEL, index), (f"http://n{index}:2380",), has_published=False)
    for index in range(3)
)
"""What a learner lists before it has caught up."""


def test_what_a_learner_lists_at_its_start_is_not_believed():
    known = (*ALL[:2], entry(2, learner=True))
    assert step(None, known, STARTING) == Remove(0)
    assert step(None, None, STARTING) == Wait()
    assert step(None, None, (*STARTING, entry(0, 7))) == Wait()
    assert next_step_out(View(seats(3), 0, LABEL, (known, None, STARTING))) == Wait()
    learner = (*ALL[1:], entry(0, 9, learner=True))
    assert next_step_out(View(seats(3), 0, LABEL, (STARTING, learner, learner))) == Remove(9)


def test_who_has_just_got_its_vote_does_not_lead_yet():
    # Its log is that of the others, but it has not carried out all of it.
    assert heirs(View(seats(3), 0, LABEL, (ALL, ALL, STARTING))) == {1}
    assert heirs(View(seats(3), 0, LABEL, (None, ALL, ALL))) == {1, 2}
    assert heirs(View(seats(3), 0, LABEL, (ALL, None, STARTING))) == set()


def test_where_most_are_hidden_no_cluster_is_made():
    assert step(None, None, None, hidden=frozenset([1])) == Bootstrap()
    assert step(None, None, None, hidden=frozenset([1, 2])) == Wait()


def test_a_learner_that_has_gone_makes_room():
    answers = (None, (ALL[1], entry(2, 9, learner=True)), None)
    assert step(*answers, gone=frozenset([2])) == Remove(9)
    assert step(*answers, gone=frozenset([1])) == Wait()


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ((None, (*ALL[1:], entry(0, 9, published=False, learner=True)), None), Promote(9)),
        ((None, (*ALL[1:], entry(0, 9, learner=True)), (*ALL[1:], entry(0, 9))), Belongs()),
        # One of them has not heard of it yet.
        ((None, ALL[1:], (*ALL[1:], entry(0, 9, learner=True))), Promote(9)),
        ((None, ALL[1:], None), StartOver()),
        ((None, None, None), Wait()),
        ((None, FORMING, None), Wait()),
    ],
)
def test_a_learner(answers, expected):
    assert step(*answers, own=9) == expected


def test_an_etcd_of_somebody_else_is_left_alone():
    strange = entry(1, label="default")
    found = step(None, (strange,), None)
    assert isinstance(found, Refuse)
    assert "an etcd that is not of this job answers at n1:2380" in found.why


def test_other_endpoints_are_a_mistake():
    found = step(None, (*FORMING[:2], entry(2, host="m2")), None)
    assert isinstance(found, Refuse)
    assert "the etcd at n1:2380 has a member at http://m2:2380" in found.why


def test_the_label_tells_jobs_and_tokens_apart():
    labels = {label_of("j", "/p", None), label_of("j", "/q", None), label_of("k", "/p", None)}
    labels |= {label_of("j", "/p", b"secret"), label_of("j", "/p", b"secret2")}
    assert len(labels) == 5
    assert all("secret" not in label for label in labels)


def test_who_is_there_at_the_start():
    view = View(seats(3), 1, LABEL, ())
    urls = [f"http://n{index}:2380" for index in range(3)]
    assert initial_cluster(view) == ",".join(f"{name_of(LABEL, i)}={url}" for i, url in enumerate(urls))
    found = initial_cluster(view, (entry(2, 7), entry(1, 9, published=False, learner=True)))
    assert found == f"{LABEL}-id7={urls[2]},{LABEL}-id9={urls[1]}"


# --- a world ---


class World:
    """The truth about a cluster, and the hosts at its seats, which see it late."""

    def __init__(self, count):
        self.seats, self.count = seats(count), count
        self.entries = []
        self.alive = set()
        """Ids of members that run."""
        self.ran = set()
        """Ids that have been part of a cluster with a quorum, and have published where clients connect."""
        self.voted = set()
        """Ids that have been part of one."""
        self.forgetful = set()
        """Seats whose hosts know that an earlier member may have voted."""
        self.leaving = set()
        """Seats whose hosts take their members out."""
        self.cut = set()
        """Seats that reach nobody, and that nobody reaches."""
        self.hosts = dict.fromkeys(range(count))
        """By seat: not there, or own id, 0 before it is known, and the list that it knows."""
        self.starting = {}
        """By id, of those that have not caught up: what they list at their start."""
        self.replaying = set()
        """Those among them that have begun to, and list former members as well."""
        self.former = []
        self.late = {}
        """By id, of those that hear late of changes: what they list."""
        self.next_id = 100

    def listed(self, number):
        return next((each for each in self.entries if each.id == number), None)

    def has_quorum(self, index=None):
        """True if a quorum runs, and if given, this seat reaches it."""
        voters = [each for each in self.entries if not each.is_learner]
        up = [each for each in voters if each.id in self.alive and self.seat(each) not in self.cut]
        return index not in self.cut and 2 * len(up) > len(voters)

    def vote(self):
        if self.has_quorum():
            self.voted |= {each.id for each in self.entries if each.id in self.alive}

    def publish(self, *indices):
        if self.has_quorum():
            here = {each.id for each in self.entries if not indices or self.seat(each) in indices}
            self.ran |= here & self.alive
            self.starting = {each: self.starting[each] for each in self.starting if each not in self.ran}
            self.entries = [
                entry(self.seat(each), each.id, published=each.id in self.ran, learner=each.is_learner)
                for each in self.entries
            ]

    def seat(self, each):
        return next(i for i, seat in enumerate(self.seats) if seat.peer_url in each.peer_urls)

    def hidden(self, index):
        """Seats that this one does not reach."""
        far = set(range(self.count)) if index in self.cut else self.cut
        return frozenset(far - {index})

    def answers(self, index):
        found = [None] * self.count
        for each in self.entries:
            if each.id in self.alive and self.seat(each) not in self.hidden(index):
                found[self.seat(each)] = self.list_of(each.id)
        return found

    def list_of(self, number):
        if number not in self.starting:
            return self.late.get(number, tuple(self.entries))
        return self.starting[number] + (tuple(self.former) if number in self.replaying else ())

    def lag(self, index):
        """Its member hears late from now on, or has heard of everything."""
        own = self.listed_at(index)
        # One that has not heard who has voted may let another one vote twice: as in `bootstrap`.
        if own is not None and self.late.pop(own.id, None) is None and self.ran >= self.voted:
            self.late[own.id] = tuple(self.entries)

    def replay(self, index):
        self.replaying |= {each.id for each in self.entries if self.seat(each) == index}

    def toggle(self, index):
        self.cut ^= {index}
        self.vote()

    def come(self, index):
        if self.hosts[index] is None:
            self.hosts[index] = 0

    def die(self, index):
        """With its member and its data."""
        self.hosts[index] = None
        self.forgetful.discard(index)
        self.leaving.discard(index)
        self.alive -= {each.id for each in self.entries if self.seat(each) == index}

    def forget(self, index):
        """Its member and its data are gone, which its host knows."""
        if self.hosts[index] is not None:
            self.die(index)
            self.forgetful.add(index)
            self.come(index)

    def leave(self, index):
        if self.hosts[index] is not None:
            self.leaving.add(index)

    def act_out(self, index):
        hidden = self.hidden(index)
        chosen = next_step_out(View(self.seats, index, LABEL, self.answers(index), hidden=hidden))
        had_quorum, reaches = self.has_quorum(), self.has_quorum(index)
        if isinstance(chosen, Remove) and reaches:
            self.remove(index, chosen.id)
            # The last one takes the cluster along.
            is_left = any(each.id in self.alive for each in self.entries)
            is_sure = had_quorum and is_left and not self.cut
            assert self.has_quorum() or not is_sure, "who leaves takes the quorum along"
        own = self.listed_at(index)
        is_last = [own] == [each for each in self.entries if not each.is_learner]
        is_out = own is None or is_last or not reaches
        assert is_out or not isinstance(chosen, Out), "who leaves is counted on"
        if own is None or not isinstance(chosen, Remove) or not reaches:
            self.die(index)

    def remove(self, index, number):
        target = self.listed(number)
        is_seen = target is not None and self.seat(target) not in self.hidden(index) | {index}
        assert not (number in self.alive and is_seen), "a member that runs is removed"
        self.former += [target] if target is not None and target.has_published else []
        self.entries = [each for each in self.entries if each.id != number]

    def listed_at(self, index):
        return next((each for each in self.entries if self.seat(each) == index), None)

    def is_member(self, index):
        return any(
            each.id in self.alive and not each.is_learner for each in self.entries if self.seat(each) == index
        )

    def act(self, index):
        own = self.hosts[index]
        if index in self.leaving:
            return self.act_out(index)
        if own is None or self.is_member(index):
            return None
        answers, hidden = self.answers(index), self.hidden(index)
        gone = frozenset(i for i, answer in enumerate(answers) if answer is None)
        view = View(self.seats, index, LABEL, answers, own or None, hidden, gone, index in self.forgetful)
        chosen = next_step(view)
        reaches = self.has_quorum(index)
        if isinstance(chosen, Bootstrap):
            self.bootstrap(index)
        elif isinstance(chosen, Remove) and reaches:
            self.remove(index, chosen.id)
        elif isinstance(chosen, Add) and reaches:
            self.next_id += 1
            self.entries.append(entry(index, self.next_id, published=False, learner=True))
            self.hosts[index] = self.next_id
            # Whoever is asked has heard of it.
            asked = next(i for i, answer in enumerate(answers) if answer is not None)
            self.late.pop(self.listed_at(asked).id, None)
            self.start(index, initial_cluster(view, self.entries))
        elif isinstance(chosen, Promote) and reaches and chosen.id in self.ran:
            self.entries = [entry(index, each.id) if each.id == chosen.id else each for each in self.entries]
        elif isinstance(chosen, StartOver):
            self.alive.discard(own)
            self.hosts[index] = 0
        assert not isinstance(chosen, Refuse)
        return self.vote()

    def start(self, index, initial):
        """As etcd does: it looks for itself in the list of one of those that answer."""
        told = dict(reversed(pair.split("=")) for pair in initial.split(","))
        listed = next(answer for answer in reversed(self.answers(index)) if answer is not None)
        ids = {each.peer_urls[0]: each.id for each in listed}
        if ids.keys() != told.keys():
            self.hosts[index] = 0
            return
        assert ids[self.seats[index].peer_url] == self.hosts[index], "a learner takes the id of another one"
        self.alive.add(self.hosts[index])
        self.starting[self.hosts[index]] = tuple(
            Entry(ids[url], name, (url,), has_published=False) for url, name in told.items()
        )

    def bootstrap(self, index):
        is_told = any(each.has_published for answer in self.answers(index) for each in answer or ())
        has_to_know = is_told and (index in self.forgetful or self.has_quorum(index))
        is_there = any(each.id in self.ran and each.id in self.alive for each in self.entries)
        is_awaited = self.listed(index) is not None and index not in self.ran
        if is_there and not is_awaited:
            # What is left of a cluster without a quorum ends with its agents, which have lost their store.
            voters = [each for each in self.entries if not each.is_learner]
            up = [each for each in voters if each.id in self.alive]
            # But for one of less than half of the seats, since the others have left.
            is_small = 2 * len(voters) < self.count
            assert is_small or 2 * len(up) <= len(voters), "beside a cluster that works another one is made"
            for seat in map(self.seat, list(self.entries)):
                if seat != index:
                    self.die(seat)
        if not any(each.id in self.alive for each in self.entries):
            self.entries = [entry(i, i, published=False) for i in range(self.count)]
            self.ran, self.voted, self.former = set(), set(), []
        assert index not in self.ran, "a member that has forgotten its votes is back under its id"
        # But for one whose agent has ended before it had published, while the others are no quorum.
        assert index not in self.voted or not has_to_know, "a member may vote twice"
        self.alive.add(index)

    def check(self):
        where = [self.seat(each) for each in self.entries]
        assert len(where) == len(set(where)), "two members at one seat"
        assert sum(each.is_learner for each in self.entries) <= 1


STEPS = st.tuples(st.sampled_from("aaaappcdxflrh"), st.integers(0, 4))


VOTED = [("c", 0), ("c", 1), ("c", 2), ("a", 0), ("a", 1), ("a", 2), ("p", 0), ("p", 1)]
"""All three have voted; the last one has not published."""


COMES = [("d", 0), ("c", 0), ("a", 0), ("a", 0)]
"""A learner that has not caught up."""


@settings(max_examples=400, deadline=None)
@example(3, False, [*VOTED, ("d", 2), ("c", 2), ("a", 2)])
@example(3, False, [*VOTED, ("d", 1), ("f", 2), ("a", 2)])
@example(3, True, [("d", 0), ("l", 1)])
@example(3, True, [("l", 1), ("a", 1), ("a", 1), ("l", 2), ("a", 2), ("a", 2), ("x", 0), ("c", 1), ("a", 1)])
@example(3, True, [("h", 1), *COMES])
@example(3, True, [("h", 2), *COMES])
@example(5, True, [*COMES, ("l", 1), ("a", 1)])
@example(5, True, [*COMES, ("r", 0), ("l", 1), ("a", 1)])
@example(5, True, [("d", 1), ("c", 1), *COMES, ("a", 1)])
@given(st.sampled_from([1, 3, 3, 5]), st.booleans(), st.lists(STEPS, max_size=80))
def test_a_cluster_whose_nodes_die_and_come_back(count, is_formed, schedule):
    world = World(count)
    prelude = [(what, index) for what in "cap" for index in range(count)] if is_formed else []
    for what, number in prelude + schedule:
        acts = {"a": world.act, "c": world.come, "d": world.die, "x": world.toggle, "p": world.publish}
        acts |= {"f": world.forget, "l": world.leave, "r": world.replay, "h": world.lag}
        acts[what](number % count)
        world.check()
    for index in tuple(world.cut):
        world.toggle(index)
    world.late = {}
    world.publish()
    for index in tuple(world.leaving):
        world.die(index)
    if world.entries and world.alive and not world.has_quorum() and world.ran:
        # Those that are left wait for the others, or for the end of their job.
        return
    for index in range(count):
        world.come(index)
    for _ in range(8 * count):
        for index in range(count):
            world.act(index)
            world.publish()
            world.check()
    assert all(world.is_member(index) for index in range(count))
