"""Tests of ``--keep-peers``: each node keeps copies of the training state of another node, its partner."""

import json
import os
import signal
import socket
import threading
import time
from contextlib import ExitStack, closing
from random import Random

import pytest
from helpers.kept_nodes import Nodes, published, said
from helpers.procs import HANG, reap_adopted, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrs._engine.inside.handover import Pace, in_chunks
from elasticrs._engine.inside.keep import layout, nodes
from elasticrs._engine.inside.keep.choice import Holding, KeptSlot
from elasticrs._engine.inside.keep.file import KeepFile
from elasticrs._engine.inside.keep.layout import Head, Mode, Slot
from elasticrs._engine.inside.keep.peers import Peers, sources, without_second_copy
from elasticrs._engine.inside.keep.schedule import Generations, Schedule
from elasticrs._engine.workers.keep_files import KeepFiles
from elasticrs._engine.workers.plan import MemoryFiles


@given(st.integers(1, 50))
def test_nodes_form_pairs_and_one_triple_if_their_number_is_odd(count):
    found = sources(count)
    assert sorted(found) == list(range(count))
    in_triple = [node for node in range(count) if found[found[node]] != node]
    assert len(in_triple) == (3 if count % 2 and count > 1 else 0)
    assert all(found[found[found[node]]] == node for node in in_triple)
    assert count == 1 or all(source != node for node, source in enumerate(found))


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12), st.integers(1, 3))
def test_a_copy_is_sent_only_if_no_other_node_has_the_same(contents, per_node):
    copies, parts = [(7, each) for each in contents], range(0, len(contents), per_node)
    places = [(first, len(contents[first : first + per_node])) for first in parts]
    sent = without_second_copy(copies, places)
    for rank, content in enumerate(contents):
        others = [each for each in range(len(contents)) if each // per_node != rank // per_node]
        assert (rank in sent) == all(contents[other] != content for other in others)


@st.composite
def lost_nodes(draw):
    """Draw what 2 to 5 nodes publish, up to 2 of which are new: copies of step 10 (secured), some of 20. The
    ranks of a new node may have died in an attempt before they had restored their state.
    """
    count, per_node = draw(st.integers(2, 5)), draw(st.integers(1, 2))
    lost = draw(st.sets(st.integers(0, count - 1), max_size=2))
    taken_from, found = sources(count), []
    died = Holding(attempt=2, mode=Mode.SHARDED).to_json()
    for node in range(count):
        holdings, partners, has_died = [], [], draw(st.booleans())
        for local_rank in range(per_node):
            slots = [KeptSlot(0, 10, 1, 3, 50 + local_rank, sequence=1)]
            if draw(st.booleans()):
                slots.append(KeptSlot(1, 20, 1, 3, 60 + local_rank, sequence=2))
            held = Holding(tuple(slots), frozenset((20,)), attempt=1, ended=23, mode=Mode.SHARDED)
            rank = {"rank": node * per_node + local_rank}
            new = {**rank, "holding": died} if has_died else None
            holdings.append(new if node in lost else {**rank, "holding": held.to_json()})
            slots = [KeptSlot(layout.SLOTS, 10, 1, 3, 50 + local_rank, sequence=1)]
            if draw(st.booleans()):
                slots.append(KeptSlot(layout.SLOTS + 1, 20, 1, 3, 60 + local_rank, sequence=2))
            held = Holding(tuple(slots), has_joined=False)
            rank = {"rank": taken_from[node] * per_node + local_rank}
            partners.append([] if node in lost else [{**rank, "holding": held.to_json()}])
        more = {"has_peers": True, "ranks_before": 0 if node in lost else count * per_node}
        found.append(published(node * per_node, holdings, partners=partners, **more))
    return found, lost, taken_from, per_node


@given(lost_nodes())
def test_the_secured_step_survives_the_loss_of_any_node_whose_partner_is_there(case):
    found, lost, taken_from, per_node = case
    choice = nodes.chosen(found, len(found) * per_node)
    if all(taken_from.index(node) not in lost for node in lost):
        assert choice["step"] in (10, 20)
        assert (choice["exact"], choice["behind"]) == (True, [])
        for node in range(len(found)):
            for local_rank in range(per_node):
                rank = node * per_node + local_rank
                _, (at, local, index, _) = nodes.source_of(choice, node, local_rank, rank)
                assert (at, local) == (taken_from.index(node) if node in lost else node, local_rank)
                assert (index >= layout.SLOTS) == (node in lost)
    else:
        assert choice["step"] is None


WRITING = -1


class Model:
    """Model of :class:`.Peers`: nodes with one rank each make generations (copies of a step by all ranks)."""

    def __init__(self, count, random):
        self.ranks, self.random, self.sources = range(count), random, sources(count)
        self.generations = [Generations(None) for _ in self.ranks]
        self.steps, self.copying = [0] * count, [None] * count
        self.own, self.taken = ([[None, None] for _ in self.ranks] for _ in range(2))
        self.number, self.announced, self.secured = 1, 2, None
        self.known, self.reports, self.is_whole = [0] * count, {}, None
        self.taking, self.done = {}, {}

    def actions(self):
        """Yield each event that may happen next, as a method and the rank to which it happens."""
        for rank in self.ranks:
            if self.copying[rank] is not None:
                yield self.finish_copy, rank
            elif self.steps[rank] == min(self.steps):
                yield self.end_step, rank
            if self.known[rank] < self.number:
                yield self.learn, rank
            elif rank not in self.reports and self.generations[rank]._finished == self.announced:
                yield self.report, rank
            if self.is_whole is not None and rank not in self.done:
                yield (self.finish_taking if rank in self.taking else self.take), rank

    def end_step(self, rank):
        self.steps[rank] += 1
        self.generations[rank].end_step(self.steps[rank])
        if self.generations[rank].is_due(self.steps[rank] - 1, self.steps[rank]):
            kept = self.generations[rank].protected() - {None}
            slot = self.random.choice([at for at in (0, 1) if self.own[rank][at] not in kept])
            self.own[rank][slot] = WRITING
            self.copying[rank] = slot

    def finish_copy(self, rank):
        slot, self.copying[rank] = self.copying[rank], None
        is_kept = self.random.random() < 0.95
        self.own[rank][slot] = self.steps[rank] if is_kept else None
        self.generations[rank].note_copy(self.steps[rank], is_kept=is_kept)

    def learn(self, rank):
        self.known[rank] = self.number
        _, copied = self.generations[rank].wait(None)
        self.generations[rank].settle(copied, is_secured=copied is not None and copied == self.secured)
        self.generations[rank].announce(self.announced)

    def report(self, rank):
        _, copied = self.generations[rank].wait(None)
        self.reports[rank] = copied if copied in self.own[rank] else None
        if len(self.reports) == len(self.ranks):
            self.is_whole = None not in self.reports.values()

    def take(self, rank):
        if not self.is_whole:
            self.done[rank] = True
        else:
            kept = self.generations[rank].secured
            free = [at for at in (0, 1) if self.taken[rank][at] != kept or kept is None]
            self.taking[rank] = self.random.choice(free)
            self.taken[rank][self.taking[rank]] = WRITING
        self.lead()

    def finish_taking(self, rank):
        self.done[rank] = self.random.random() < 0.9
        self.taken[rank][self.taking.pop(rank)] = self.reports[rank] if self.done[rank] else None
        self.lead()

    def lead(self):
        if len(self.done) == len(self.ranks):
            if self.is_whole and all(self.done.values()):
                self.secured = self.reports[0]
            self.number, self.announced = self.number + 1, max(self.steps) + self.random.randint(1, 3)
            self.reports, self.is_whole, self.done = {}, None, {}

    def copy_at_death(self, rank):
        kept = self.generations[rank].protected() - {None}
        free = [at for at in (0, 1) if self.own[rank][at] not in kept]
        if self.copying[rank] is None and free:
            self.own[rank][self.random.choice(free)] = self.steps[rank]

    def common(self, lost):
        """Return the steps of which each rank's copy is left on its node or its partner without ``lost``."""
        found = [
            self.taken[self.sources.index(rank)] if rank == lost else self.own[rank] for rank in self.ranks
        ]
        return set.intersection(*map(set, found)) - {None, WRITING}


@settings(deadline=None)
@given(st.integers(2, 5), st.integers())
def test_once_a_generation_is_secured_the_loss_of_a_node_leaves_a_common_step(count, seed):
    model = Model(count, Random(seed))
    for _ in range(model.random.randint(100, 200) * count // 2):
        act, rank = model.random.choice([*model.actions()])
        act(rank)
        if model.secured is not None:
            for lost in (None, *range(count)):
                assert max(model.common(lost)) >= model.secured
    assert model.number > 2
    # A node is lost. The agents of the other nodes stop their ranks, which first copy their state once more.
    # That must not replace the last copies of a common step.
    lost = model.random.randrange(count)
    for rank in model.ranks:
        if rank != lost:
            model.copy_at_death(rank)
    assert model.secured is None or max(model.common(lost)) >= model.secured


class Store:
    """Imitates :class:`.nodes.Store`, through which the ranks of an attempt exchange values."""

    def __init__(self):
        self.values, self.lock = {}, threading.Lock()

    def set(self, key, value):
        self.values[key] = json.loads(json.dumps(value))

    def get(self, key):
        return self.values[key]

    def get_all(self, keys):
        return [self.values[key] for key in keys]

    def has(self, key):
        return key in self.values

    def add(self, key, number):
        with self.lock:
            self.values[f"sum {key}"] = self.values.get(f"sum {key}", 0) + number
            return self.values[f"sum {key}"]


class Wire:
    """Faulty network between a server and its clients: relays the bytes of one client after the other. The
    function ``fault`` may change the bytes that the server sends. It returns ``None`` to end the connection.
    """

    def __init__(self, address, fault):
        self._address, self._fault = address, fault
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while True:
            try:
                client = self._server.accept()[0]
            except OSError:
                return
            with client, socket.create_connection(self._address) as server:
                client.settimeout(HANG)
                server.settimeout(HANG)
                request = client.recv(4096)
                server.sendall(request)
                part = request.split()[1]
                while data := server.recv(1 << 16):
                    if (data := self._fault(part, data)) is None:
                        break
                    try:
                        client.sendall(data)
                    except OSError:
                        break

    def close(self):
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(HANG)


class Ranks:
    """Ranks of several nodes, one on each, in this process: their files, and threads that download copies."""

    def __init__(
        self,
        monkeypatch,
        count,
        *,
        restored=None,
        memory=1 << 30,
        every=None,
        mode=Mode.SHARDED,
        has_partners=True,
    ):
        self.store, self.said, self.step = Store(), [], restored or 0
        monkeypatch.setattr("elasticrs._engine.inside.keep.peers.say", self.said.append)
        self.files = [(MemoryFiles(1), MemoryFiles(1)) for _ in range(count)]
        self.agents = [KeepFiles(*files) for files in self.files]
        for agent in self.agents:
            agent.begin({}, {}, None)
        self.own = [KeepFile(own.places[0]) for own, _ in self.files]
        self.handovers, self.peers, self.schedules = [], [], []
        shares = [[node, 1] for node in range(count)]
        near = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": str(count), "LOCAL_RANK": "0"}
        for rank, (_, partners) in enumerate(self.files):
            for name, value in {**near, "RANK": str(rank), "GROUP_RANK": str(rank)}.items():
                monkeypatch.setenv(name, value)
            plan = {"step": restored, "memory": memory, "bandwidth": 0, "partner_files": partners.places}
            theirs = KeepFile(partners.places[0])
            files = [self.own[rank], theirs]
            self.handovers.append(nodes._offer(self.store, (rank, 0), files, 0, lambda _: None))
            agreement = nodes.Agreement(plan, self.store)
            agreement.nodes = shares if has_partners else None
            self.schedules.append(Schedule(self.own[rank].words, (), rank, every, mode, has_other_nodes=True))
            self.peers.append(Peers(agreement, self.own[rank], self.schedules[-1]))
            if restored is not None:
                self.copy(rank, restored)

    def copy(self, rank, step, content=None):
        """Write a copy of a rank's state into its file: bytes that differ in each step and on each rank."""
        kept = self.schedules[rank].generations.protected() - {step}
        slots = [slot for slot in self.own[rank].slots if slot.complete_step not in kept or not kept - {None}]
        slot = min(slots, key=lambda each: each.sequence)
        data = content or bytes([step % 251, rank]) * (SIZE // 2)
        slot.reserve(2 * layout.PAGE + len(data))
        facts = {Slot.STEP: step, Slot.RANK: rank, Slot.WORLD: len(self.own), Slot.DATA_LENGTH: len(data)}
        slot.begin(b"index", 2 * layout.PAGE, facts)
        slot.map[2 * layout.PAGE : 2 * layout.PAGE + len(data)] = data
        digest = sum(memoryview(data).cast("q")) % (1 << 64)
        slot.complete(digest, 1 + max(each.sequence for each in self.own[rank].slots))

    def begin(self, *, without=None):
        for rank, (peers, schedule) in enumerate(zip(self.peers, self.schedules, strict=True)):
            for step in range(1, 4):
                schedule.next(self.step + step, is_idle=True)
            schedule.generations.note_copy(self.step + 2, is_kept=False)
            if rank != without:
                peers.begin()

    def announced(self):
        """Wait until all ranks know which step they copy next. Return this step, and the secured one."""
        agreed = [schedule.generations for schedule in self.schedules]
        wait_until(lambda: all(each._finished < (each._announced or -1) for each in agreed))
        (step,) = {each._announced for each in agreed}
        (secured,) = {each.secured for each in agreed}
        return step, secured

    def copy_all(self, *, without=(), content=None):
        """Have all ranks copy the announced step. The copies of ranks ``without`` fail. Return the step."""
        step, _ = self.announced()
        for rank, schedule in enumerate(self.schedules):
            if rank in without:
                schedule.generations.note_copy(step, is_kept=False)
            is_due, _ = schedule.next(step, is_idle=True)
            assert is_due
            if rank not in without:
                self.copy(rank, step, content)
            schedule.generations.note_copy(step, is_kept=rank not in without)
        return step

    def taken(self, node):
        """Return the copies that a node has downloaded from another node: by step, the rank and the bytes."""
        file = KeepFile(self.files[node][1].places[0])
        found = {}
        for slot in file.slots:
            if slot.complete_step is not None:
                private, words, index = slot.read_only()
                assert index == b"index"
                data = private[words[Slot.DATA_AT] :][: words[Slot.DATA_LENGTH]]
                found[slot.complete_step] = words[Slot.RANK], data
        file.close()
        return found

    def close(self):
        for each in (*self.peers, *self.handovers):
            each.close()
        for each in self.own:
            each.close()
        for pair in self.files:
            for each in pair:
                each.close()


SIZE = (4 << 20) + 4096


@pytest.fixture
def ranks(monkeypatch):
    """Return a function that makes :class:`Ranks`. They are closed after the test."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # No threads that outlive the test.
    # Import torch here, because the import takes seconds, and not all tests need it.
    pytest.importorskip("torch").set_num_threads(1)
    monkeypatch.setattr("elasticrs._engine.inside.keep.peers._END_LIMIT", 0.1)
    with ExitStack() as stack:
        yield lambda *args, **named: stack.enter_context(closing(Ranks(monkeypatch, *args, **named)))


@pytest.fixture
def wire():
    """Return a function that puts a :class:`Wire` between the server of a node and its client."""
    with ExitStack() as stack:

        def put(ranks, source, fault):
            record = ranks.store.get(f"offer/{source}/0")
            made = stack.enter_context(closing(Wire((record["host"], record["port"]), fault)))
            ranks.store.set(f"offer/{source}/0", {**record, "host": made.address[0], "port": made.address[1]})

        yield put


def content(step, rank):
    return rank, bytes([step % 251, rank]) * (SIZE // 2)


@pytest.mark.parametrize("count", [2, 3])
def test_each_node_has_the_copies_of_another_one_and_keeps_the_secured_ones(ranks, count):
    made, steps = ranks(count), []
    made.begin()
    for _ in range(3):
        steps.append(made.copy_all())
        assert made.announced()[1] == steps[-1]
        for node, source in enumerate(sources(count)):
            expected = {step: content(step, source) for step in steps[-2:]}
            assert made.taken(node) == expected
    assert made.said == []
    assert all(file.words[Head.SECURED] == steps[-1] + 1 for file in made.own)


def test_the_step_at_which_a_node_leaves_is_secured_also_while_a_copy_is_being_sent(ranks):
    found = ranks(2)
    found.begin()
    last = found.copy_all() + 1
    for rank, schedule in enumerate(found.schedules):
        schedule.generations.begin_last(last, HANG)
        found.copy(rank, last)
        schedule.generations.note_copy(last, is_kept=True)
    for rank, schedule in enumerate(found.schedules):
        schedule.generations.await_settled(HANG)
        assert schedule.generations.secured == last
        assert found.own[rank].words[Head.SECURED] == last + 1
        assert found.taken(rank)[last] == content(last, 1 - rank)


def test_without_partners_ranks_know_which_copies_the_others_have(ranks):
    made = ranks(3, every=2, has_partners=False, mode=Mode.AUTO)
    agreed = [schedule.generations for schedule in made.schedules]
    made.begin()
    for _ in range(3):
        step, before = made.announced()
        assert step % 2 == 0
        for rank, schedule in enumerate(made.schedules):
            assert schedule.next(step, is_idle=True)[0]
            made.copy(rank, step, bytes(4096))
            assert schedule.protected() == {before, step} or schedule.is_replicated()
            schedule.generations.note_copy(step, is_kept=True)
        for each in agreed:
            each.await_settled(HANG)
            assert each.protected() == {step}
        for schedule in made.schedules:
            assert not schedule.next(step + 1, is_idle=True)[0]
    assert all(schedule.is_replicated() for schedule in made.schedules)
    assert made.taken(0) == {}


def test_a_restored_step_is_sent_at_once(ranks):
    made = ranks(2, restored=40)
    made.begin()
    assert made.announced()[1] == 40
    assert made.taken(0) == {40: content(40, 1)}


def test_equal_states_are_not_sent(ranks):
    made = ranks(2, mode=Mode.AUTO)
    made.begin()
    step = made.copy_all(content=bytes(4096))
    assert made.announced()[1] == step
    assert made.taken(0) == made.taken(1) == {}
    assert not any(schedule.is_replicated() for schedule in made.schedules)
    made.copy_all(content=bytes(4096))
    made.announced()
    assert all(schedule.is_replicated() for schedule in made.schedules)
    assert all(file.words[Head.WAS_REPLICATED] for file in made.own)


def test_without_a_rank_s_copy_the_generation_before_stays(ranks):
    made = ranks(2)
    made.begin()
    first = made.copy_all()
    second = made.copy_all(without=(1,))
    assert made.announced()[1] == first
    assert set(made.taken(0)) == set(made.taken(1)) == {first}
    third = made.copy_all()
    assert made.announced()[1] == third
    assert set(made.taken(0)) == {first, third}
    assert second not in {slot.complete_step for slot in made.own[0].slots}


def test_a_rank_that_learns_of_a_step_too_late_leaves_the_step_before_secured_on_all(ranks):
    made = ranks(2, has_partners=False)
    made.begin()
    first = made.copy_all()
    second, _ = made.announced()
    late = made.schedules[1].generations
    late._announced = None  # Rank 1 has not read the announcement yet.
    for rank, schedule in enumerate(made.schedules):
        assert schedule.next(second, is_idle=True)[0] == (rank == 0)
    made.copy(0, second)
    for step in (second + 1, second + 2):
        assert not any(schedule.next(step, is_idle=True)[0] for schedule in made.schedules)
    made.schedules[0].generations.note_copy(second, is_kept=True)
    assert made.schedules[0].protected() == {first, second}
    late.announce(second)
    assert made.announced()[1] == first
    assert all(schedule.protected() - {None} == {first} for schedule in made.schedules)


@pytest.mark.parametrize(("rank", "mode"), [(0, Mode.AUTO), (1, Mode.AUTO), (1, Mode.SHARDED)])
def test_all_nodes_say_once_that_a_rank_makes_no_copies_any_more(ranks, monkeypatch, rank, mode):
    from elasticrs._engine.inside.keep.copier import Copier  # Here, because it imports torch.

    made = ranks(3, has_partners=False, mode=mode)
    made.begin()
    first = made.copy_all()
    made.announced()
    reasons = []
    monkeypatch.setattr("elasticrs._engine.inside.keep.copier.say", reasons.append)
    copier = Copier(made.own[rank], {}, 0, 0, "", made.schedules[rank])
    copier.turn_off("there is not enough memory")
    copier.finish(HANG)
    assert reasons == ["Keep is off: there is not enough memory"]
    generations = [schedule.generations for schedule in made.schedules]
    step = generations[0]._announced
    others = [each for each in range(3) if each != rank]
    for _ in range(2):
        for other in others:
            if made.schedules[other].next(step, is_idle=True)[0]:
                made.copy(other, step)
                made.schedules[other].generations.note_copy(step, is_kept=True)
        wait_until(lambda: len(made.said) == 3)
        if (rank, mode) == (1, Mode.AUTO):
            wait_until(lambda before=step: all(each._announced > before for each in generations))
            step = generations[0]._announced
        else:
            wait_until(lambda: not any(each.are_compared for each in generations))
    assert len({text.partition(":")[0] for text in made.said}) == len(set(made.said)) == 1
    assert f"rank {rank} makes no copies any more" in made.said[0]
    assert {each.secured for each in generations} == {first}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("key", ["copied/{}", "taken"])
def test_a_rank_that_cannot_compare_its_copies_tells_the_others_why(ranks, monkeypatch, rank, key):
    """The rank's access to the store fails once: to tell the others of a copy, or of a completed download."""
    monkeypatch.setattr("elasticrs._engine.inside.keep.peers._QUIET", 0)
    made = ranks(3)
    made.begin()
    first = made.copy_all()
    made.announced()
    made.peers[rank]._store = FaultyStore(made.store, key.format(rank))
    second = made.copy_all()
    generations = [schedule.generations for schedule in made.schedules]
    if (rank, key) == (1, "taken"):
        # Rank 0 has compared the copies of this step. So the other ranks learn of it after their next copies.
        for other in (0, 2):
            step = wait_until(lambda at=other: generations[at]._announced, lambda each: each > second)
            made.schedules[other].next(step, is_idle=True)
            generations[other].note_copy(step, is_kept=False)
    wait_until(lambda: len(made.said) == 3)
    wait_until(lambda: not any(each.are_compared for each in generations))
    (own,) = [text for text in made.said if text.startswith("this rank makes no more periodic copies")]
    others = {text for text in made.said if text != own}
    assert f"rank {rank} makes no copies any more" in others.pop()
    assert not others
    assert all("the wire is cut" in text for text in made.said)
    assert {each.secured for each in generations} == {first}


class FaultyStore:
    """Access to a store that fails once: when a value is written for a key."""

    def __init__(self, store, key):
        self._store, self._key = store, key

    def _call(self, method, key, value):
        if key == self._key and value:
            self._key = None
            raise ConnectionError("the wire is cut")
        return method(key, value)

    def set(self, key, value):
        self._call(self._store.set, key, value)

    def add(self, key, number):
        return self._call(self._store.add, key, number)

    def __getattr__(self, name):
        return getattr(self._store, name)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_keep_is_not_waited_for(ranks, rank):
    made = ranks(2, has_partners=False)
    nodes.leave(made.store, rank, 2, "the agent's memory cannot be opened")
    made.begin(without=rank)
    wait_until(lambda: made.said)
    assert f"rank {rank} makes no copies any more (the agent's memory cannot be opened)" in made.said[0]
    wait_until(lambda: not made.schedules[1 - rank].generations.are_compared)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_say_that_they_wait_for_one_that_does_not_use_keep(ranks, monkeypatch, rank):
    monkeypatch.setattr("elasticrs._engine.inside.keep.peers._LATE", 0.1)
    made = ranks(2, has_partners=False)
    made.begin(without=rank)
    wait_until(lambda: made.said)
    assert made.said[0].startswith("no more periodic copies are made until all ranks have said")


@pytest.mark.parametrize(("key", "value"), [("next", ["x", []]), ("next", 7), ("compared", [1, [], True])])
def test_a_damaged_value_in_the_store_ends_the_copies_and_not_the_training(ranks, monkeypatch, key, value):
    monkeypatch.setattr("elasticrs._engine.inside.keep.peers._QUIET", 0)
    made = ranks(2, has_partners=False)
    real = made.store.set
    made.store.set = lambda name, found: real(name, [found[0], value] if name == key else found)
    made.begin()
    wait_until(lambda: len(made.said) == 2)
    assert all("makes no more periodic copies" in text for text in made.said)
    assert not any(schedule.next(9, is_idle=True)[0] for schedule in made.schedules)


def test_a_damaged_copy_of_a_partner_is_dropped_when_another_node_wants_to_restore_it(ranks):
    made = ranks(2)
    made.begin()
    step = made.copy_all()
    made.announced()
    # Suppose that the node of rank 1 is lost. Node 0 has downloaded rank 1's copy before, and serves it.
    theirs = KeepFile(made.files[0][1].places[0])
    (number,) = [each for each, slot in enumerate(theirs.slots) if slot.complete_step == step]
    copy, said = f"{layout.SLOTS + number}", []
    serving = nodes._offer(made.store, (0, 0), [made.own[0], theirs], 0, said.append)
    with closing(MemoryFiles(1)) as memory, closing(theirs), closing(serving):
        offer = serving.offer
        KeepFiles(memory).begin({}, {}, None)
        new = KeepFile(memory.places[0])
        nodes.take_copy(offer, copy, new, 1 << 30)
        assert step in [slot.complete_step for slot in new.slots]
        theirs.slots[number].map[3 * layout.PAGE] ^= 1
        with pytest.raises(ConnectionError):
            nodes.take_copy(offer, copy, new, 1 << 30)
        assert theirs.slots[number].complete_step is None
        assert theirs.words[Head.DAMAGED] == step + 1
        wait_until(lambda: len(said) == 2)
        assert f"step {step} in the memory of this node" in said[0]
        assert "the checksum is wrong" in said[1]
        new.close()


def test_the_agent_reads_which_copies_of_other_ranks_a_file_has(ranks):
    made = ranks(2)
    made.begin()
    step = made.copy_all()
    made.announced()
    found = made.agents[0].partner_holdings(0, 2)
    (slot,) = found[1].slots
    assert (slot.step, slot.index >= layout.SLOTS, found[1].has_joined) == (step, True, False)
    assert made.agents[0].partner_holdings(0, 3) == {}


@pytest.mark.parametrize(
    ("counts", "options", "why"),
    [
        ((1, 1), (True, True), ""),
        ((1, 1), (False, False), ""),
        ((1, 1), (True, False), "node 1 was started without --keep-peers 1"),
        ((1,), (True,), "the job has only one node now"),
        ((1, 2), (True, True), "the nodes have different numbers of workers"),
    ],
)
def test_nodes_without_partners_say_why(counts, options, why):
    found = [
        published(sum(counts[:node]), [None] * count, has_peers=has_peers)
        for node, (count, has_peers) in enumerate(zip(counts, options, strict=True))
    ]
    choice = nodes.chosen(found, sum(counts))
    assert (choice["no_peers"], choice["has_peers"]) == (why, options[0] and not why)


def flips(part, data):
    return bytes([data[0] ^ 16]) + data[1:] if part == b"data" else data


def cuts(part, data):
    return None if part == b"data" else data


@pytest.mark.parametrize(("fault", "why"), [(flips, "damaged on its way"), (cuts, "ended too early")])
def test_a_faulty_wire_leaves_the_copy_before_and_a_line(ranks, wire, fault, why):
    made, faults = ranks(2), []
    made.begin()
    first = made.copy_all()
    made.announced()
    wire(made, 1, lambda part, data: fault(part, data) if faults else data)
    faults.append(True)
    second = made.copy_all()
    assert made.announced()[1] == first
    assert set(made.taken(0)) == {first}
    assert set(made.taken(1)) == {first, second}
    (line,) = made.said
    assert f"rank 1's copy of step {second}" in line
    assert why in line
    faults.clear()
    third = made.copy_all()
    assert made.announced()[1] == third
    assert made.taken(0) == {step: content(step, 1) for step in (first, third)}
    assert set(made.taken(1)) == {first, third}


def test_a_slow_partner_is_given_up_after_three_transfers(ranks, wire, monkeypatch):
    monkeypatch.setattr("elasticrs._engine.inside.handover.TRANSFER_TIMEOUT", 0.05)
    stop = threading.Event()
    made = ranks(2)
    made.begin()
    wire(made, 1, lambda part, data: None if part == b"data" and stop.wait(1) else data)
    secured = []
    for _ in range(4):
        made.copy_all()
        secured.append(made.announced()[1])
    stop.set()
    assert secured[:2] == [None, None]
    assert secured[3] is not None
    # Do not say that another node has a copy that it does not download any more.
    assert [file.words[Head.SECURED] for file in made.own] == [0, 0]
    assert len(made.said) == 3
    assert "too slow" in made.said[0] or "timed out" in made.said[0]
    assert "not kept here any more" in made.said[2]


def test_a_copy_that_does_not_fit_into_the_memory_is_refused_with_numbers(ranks):
    made = ranks(2, memory=16 << 20)
    made.begin()
    step = made.copy_all()
    assert made.announced()[1] == step
    assert made.taken(0) == made.taken(1) == {}
    assert [file.words[Head.SECURED] for file in made.own] == [0, 0]
    assert len(made.said) == 2
    assert "it needs 5 MiB, and --keep-memory leaves 3 MiB for it" in made.said[0]


@given(
    st.lists(st.tuples(st.integers(1, 1 << 22), st.floats(0, 0.3)), min_size=1, max_size=50),
    st.integers(1 << 20, 1 << 30),
)
def test_the_pace_holds_the_rate(pieces, rate):
    now, sent = [100.0], 0
    pace = Pace(rate, lambda: now[0])
    for size, held_up in pieces:
        now[0] += held_up
        delay = pace.delay(size)
        now[0] += delay
        # When a piece is sent, the bytes before it must not exceed the rate. 50 ms too early is allowed.
        assert sent <= (now[0] - 100 + 0.051) * rate
        # If the sender has to wait, then only for as long as the bytes before the piece need at this rate.
        assert not delay or sent >= (now[0] - 100 - sum(gap for _, gap in pieces)) * rate * 0.99
        sent += size


def test_a_transfer_is_not_faster_than_the_limit():
    data = os.urandom(4 << 20)
    begun = time.monotonic()
    sent = b"".join(in_chunks(memoryview(data), Pace(20e6)))
    # The limit is a bit lower: the first pieces may be 50 ms early, and no pause follows the last one.
    assert time.monotonic() - begun >= 0.95 * len(data) / 20e6 - 0.075
    assert len(sent) == len(data) + 4


TRAINS = """
    import hashlib, os, sys, threading, torch, torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from elasticrs import Keep

    steps, pause = int(sys.argv[1]), float(sys.argv[2])
    dist.init_process_group("gloo")
    rank, number = dist.get_rank(), os.environ["ELASTICRS_ROUND"]
    torch.manual_seed(1)
    width = int(os.environ["WIDTH"])
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 7))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    keep = Keep(model=model, optimizer=optimizer, every=5)
    step = keep.restore()
    source = keep.source
    print(f"BEGIN {number} {rank} {step} {source and (source.tier, source.exact)}", flush=True)
    while step < steps:
        optimizer.zero_grad()
        data = torch.randn(4, 64)
        if sys.argv[3:] == [f"{number} {rank} {step}"]:
            raise ValueError("wrong data")
        model(data).square().mean().backward()
        optimizer.step()
        threading.Event().wait(pause)
        step += 1
        keep.step(step)
        print("STEP", number, rank, step, flush=True)
    found = b"".join(each.detach().to_local().numpy().tobytes() for each in model.parameters())
    print("END", rank, hashlib.sha256(found).hexdigest(), flush=True)
    dist.destroy_process_group()
"""


@pytest.fixture
def agents(launch, worker_script):
    """Return a function that starts agents of a job with three nodes."""
    script = worker_script(TRAINS)

    def start(count, *arguments, options=(), width=100):
        command = ("--nnodes=3", "--nproc-per-node=1", "--max-restarts=1", "--keep-peers=1", *options, script)
        return Nodes(launch, *command, *arguments, env={"WIDTH": str(width)}).start(count)

    return start


@pytest.mark.torch
@pytest.mark.slow
def test_a_lost_node_costs_the_steps_since_the_last_secured_copy(agents):
    job = agents(3, "60", "0")
    assert [agent.wait() for agent in job] == [0, 0, 0]
    expected = said(job, "END")
    job = agents(4, "60", "0.05")
    host, *others = job
    host.wait_for_line(r"STEP 1 \d 40")
    for agent in others:
        agent.read_for(0.05)
    lost = next(agent for agent in others if said([agent], "BEGIN"))
    os.kill(lost.pid, signal.SIGKILL)
    left = [agent for agent in job if agent is not lost]
    codes = [agent.wait() for agent in left]
    lost.wait()
    reap_adopted()
    assert codes == [0, 0, 0]
    assert said(left, "END") == expected
    begun = [line.split() for line in said(left, "BEGIN 2")]
    (step,) = {int(words[1]) for words in begun}
    ended = max(int(line.split()[1]) for line in said(job, "STEP 1"))
    # Copies are 5 steps apart. When the node is lost, its partner may not have the newest one yet.
    assert 0 <= ended - step <= 11
    lines = "".join(agent.stderr for agent in left)
    assert f"the training continues at step {step}, copied by 3 of 3 ranks" in lines
    assert "from the copy on node" in lines
    assert sorted(words[2] for words in begun) == ["('memory',", "('memory',", "('peer',"]
    assert all(words[3] == "True)" for words in begun)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "width"),
    [((), 100), (("--keep-bandwidth=1M", "--keep-grace=60"), 36_000)],
    ids=["idle", "during a transfer"],
)
def test_a_drained_node_of_sharded_state_costs_no_step(agents, options, width):
    job = agents(3, "40", "0", width=width)
    assert [agent.wait() for agent in job] == [0, 0, 0]
    expected = said(job, "END")
    job = agents(4, "40", "0.05", options=options, width=width)
    host, *others = job
    host.wait_for_line(r"STEP 1 \d 22")
    for agent in others:
        agent.read_for(0.05)
    drained = next(agent for agent in others if said([agent], "BEGIN"))
    drained.signal(signal.SIGTERM)
    left = [agent for agent in job if agent is not drained]
    assert [agent.wait() for agent in (*left, drained)] == [0, 0, 0, 1]
    ended = max(int(line.split()[1]) for line in said(job, "STEP 1"))
    begun = {tuple(line.split()[1:]) for line in said(left, "BEGIN 2")}
    assert begun == {(f"{ended}", "('memory',", "True)"), (f"{ended}", "('peer',", "True)")}
    assert said(left, "END") == expected
    assert f"step {ended} here is deleted" in drained.stderr
    assert "another node has a second one" in drained.stderr


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--keep-peers=1",)], ids=["alone", "with partners"])
def test_an_exception_in_the_step_after_a_copy_costs_no_sharded_step(launch, worker_script, options):
    command = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", *options, worker_script(TRAINS))
    ends = []
    for more in ((), ("1 1 11",)):
        job = Nodes(launch, *command, "20", "0", *more, env={"WIDTH": "100"}).start(2)
        assert [agent.wait() for agent in job] == [0, 0]
        ends.append(said(job, "END"))
    assert said(job, "BEGIN 2") == ["0 11 ('memory', True)", "1 11 ('memory', True)"]
    assert ends[0] == ends[1]
