"""Nodes that share a back end agree whatever the order of their turns, even if replies are lost."""

from datetime import timedelta

import pytest
from helpers.said import says
from hypothesis import given
from hypothesis import strategies as st

from elasticrs.rendezvous import RendezvousConnectionError, RendezvousError
from elasticrs.rendezvous.dynamic import actions
from elasticrs.rendezvous.dynamic.rendezvous_settings import RendezvousSettings, RendezvousTimeout
from elasticrs.rendezvous.dynamic.rendezvous_state import Node, Place, decode
from elasticrs.rendezvous.dynamic.turns import Operation, SharedState

from .backends import MemoryBackend

JOIN, LAST_CALL, INTERVAL, ATTEMPTS = 100.0, 2.0, 1.0, 3


class Player:
    """An agent that joins, sends keep-alives, and joins again when its round is over."""

    def __init__(self, world, number):
        self.world, self.number = world, number
        self.node = Node(f"node{number}", 1, 0)
        # Each host's clock has a different offset.
        self.shift = number * 12345.0
        self.shared = SharedState(world.backend, world.settings, self.node, lambda: world.now + self.shift)
        self.alive, self.error = True, None
        self.begin()

    def begin(self):
        self.round, self.wants = None, [actions.leave, actions.join]
        self.operation, self.ready = None, self.world.now

    def lets_in(self):
        return actions.waiting(self.shared.state, self.world.settings) > 0

    def turn(self):
        """Access the back end once."""
        if self.operation is None:
            wanted = self.wants[0] if self.wants else actions.keep_alive
            self.operation = Operation(self.shared, wanted, JOIN)
        try:
            pause = self.operation.turn()
        except RendezvousConnectionError:
            # Retry, as the agent would do in its next attempt.
            self.operation = None
            return
        except RendezvousError as error:
            self.error, self.alive = error, False
            return
        if pause is not None:
            self.ready = self.world.now + pause
            return
        self.operation = None
        if self.wants:
            self.wants.pop(0)
            if not self.wants:
                state = self.shared.state
                self.round = state.round
                self.world.formed(state)
        elif actions.ended(self.shared.state, self.node, self.round) or self.lets_in():
            self.begin()
        else:
            self.ready = self.world.now + INTERVAL / 2


class World:
    def __init__(self, low, high):
        self.now, self.backend = 1000.0, MemoryBackend()
        timeout = RendezvousTimeout(timedelta(seconds=JOIN), timedelta(seconds=LAST_CALL))
        self.settings = RendezvousSettings("job", low, high, timeout, timedelta(seconds=INTERVAL), ATTEMPTS)
        self.players, self.rounds = [], {}

    def add(self):
        self.players.append(Player(self, len(self.players)))
        return self.players[-1]

    def formed(self, state):
        """Check that all nodes agree about the round, and that each has its own rank."""
        members = {node: state.nodes[node].rank for node in state.at(Place.PARTICIPANT)}
        assert sorted(members.values()) == list(range(state.size))
        assert self.settings.min_nodes <= state.size <= self.settings.max_nodes
        assert self.rounds.setdefault(state.round, members) == members

    def alive(self):
        return [player for player in self.players if player.alive]

    def run(self, seconds):
        """Run all turns that are due in this period, ordered by time."""
        end = self.now + seconds
        while (due := min(self.alive(), key=lambda player: player.ready, default=None)) is not None:
            if due.ready > end:
                break
            self.now = max(self.now, due.ready) + 0.001
            due.turn()
        self.now = max(self.now, end)

    def settled(self):
        """Return the numbers of the nodes that are members of the current, intact round."""
        state = decode(self.backend.value)
        assert state.is_intact
        return sorted(
            player.number for player in self.alive() if player.round == state.round and not player.wants
        )


STEPS = st.one_of(
    st.tuples(st.just("turn"), st.integers(0, 4)),
    st.tuples(st.just("time"), st.floats(0.01, 3)),
    st.tuples(st.just("trouble"), st.sampled_from(["lost", "refused", "overtaken"])),
    st.tuples(st.just("add"), st.just(0)),
    st.tuples(st.just("kill"), st.integers(0, 4)),
    st.tuples(st.just("again"), st.integers(0, 4)),
)


@given(st.integers(1, 3), st.integers(0, 2), st.lists(STEPS, max_size=60))
def test_all_live_nodes_end_up_in_one_round(low, more, steps):
    world = World(low, low + more)
    world.add()
    for what, which in steps:
        if what == "time":
            world.run(which)
        elif what == "trouble":
            world.backend.trouble.append(which)
        elif what == "add" and len(world.players) < 6:
            world.add()
        elif what == "turn" and world.alive():
            # Take a turn too early or too late, because the result must not depend on when it comes.
            world.alive()[which % len(world.alive())].turn()
        elif what == "kill" and world.alive():
            world.alive()[which % len(world.alive())].alive = False
        elif what == "again" and world.alive():
            # The agent's workers have failed, so it joins again.
            world.alive()[which % len(world.alive())].begin()
    world.backend.trouble.clear()
    while len(world.alive()) < low:
        world.add()
    world.run(60)
    state = decode(world.backend.value)
    assert len(world.settled()) == state.size == min(len(world.alive()), world.settings.max_nodes)
    assert len(state.nodes) == len(world.alive())
    assert actions.waiting(state, world.settings) == 0
    assert all(player.error is None for player in world.alive())


def test_the_last_call_lasts_for_last_call_timeout():
    world = World(2, 3)
    for _ in range(2):
        world.add()
    begun = world.now
    world.run(LAST_CALL - 0.1)
    assert not decode(world.backend.value).is_complete
    world.run(0.5)
    assert world.settled() == [0, 1]
    assert world.now - begun < LAST_CALL + 1


def test_the_last_call_ends_when_max_nodes_have_joined():
    world = World(2, 3)
    for _ in range(3):
        world.add()
    world.run(0.5)
    assert world.settled() == [0, 1, 2]


def test_a_dead_node_is_replaced_by_a_spare():
    world = World(2, 2)
    first, second, spare = world.add(), world.add(), world.add()
    world.run(1)
    inside = [player for player in (first, second, spare) if player.round is not None]
    outside = next(player for player in (first, second, spare) if player.round is None)
    assert decode(world.backend.value).place_of(outside.node) is Place.REDUNDANT
    # Wait for longer than the join timeout, because a spare may wait forever.
    world.run(2 * JOIN)
    inside[0].alive = False
    world.run(INTERVAL * ATTEMPTS + 2)
    assert world.settled() == sorted([inside[1].number, outside.number])


def test_a_node_becomes_a_spare_when_the_round_fills_without_it():
    world = World(1, 2)
    first = world.add()
    world.run(LAST_CALL + 0.5)
    second, third = world.add(), world.add()
    world.run(INTERVAL * ATTEMPTS)
    first.begin()
    world.run(2 * LAST_CALL + INTERVAL * ATTEMPTS)
    assert len(world.settled()) == 2
    state = decode(world.backend.value)
    assert len(state.at(Place.REDUNDANT)) == 1
    assert actions.waiting(state, world.settings) == 0
    assert {second.alive, third.alive} == {True}


def test_too_few_nodes_time_out_and_leave_no_state_behind():
    world = World(2, 2)
    world.add()
    world.run(JOIN + 1)
    says(str(world.players[0].error), "100 s", "0 nodes", "2 ")
    assert decode(world.backend.value).nodes == {}


def test_a_slow_reader_does_not_consider_other_nodes_dead():
    """A node is dead only if its keep-alives are late by the reader's own clock. A late reader does not make
    it dead.
    """
    world = World(2, 2)
    first, second = world.add(), world.add()
    world.run(1)
    # The first node does not read for a long time, while the second one sends keep-alives.
    first.ready = world.now + 50
    for _ in range(40):
        world.run(INTERVAL)
    first.shared.read()
    assert first.shared.state.place_of(second.node) is Place.PARTICIPANT


@pytest.mark.parametrize("trouble", ["lost", "refused", "overtaken"])
def test_a_node_recovers_from_a_failed_write(trouble):
    world = World(1, 1)
    player = world.add()
    world.backend.trouble = [None, None, trouble]
    world.run(5)
    assert world.settled() == [player.number]
