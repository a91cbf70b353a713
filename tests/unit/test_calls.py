"""Calls (requests between the agents of a job) through a store that this test simulates, and exchanges of
values between them through a real store.
"""

import select
from math import inf, nan
from typing import NamedTuple

import pytest
from helpers.procs import HANG
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.nodes.calls import MAX_ANSWER, Calls, Exchange, RoundPlace
from elasticrs._engine.nodes.protocol.records import Keys, encode
from elasticrs._engine.nodes.transport.coordination import (
    Changes,
    Client,
    DeletePrefix,
    NativeSession,
    Put,
    Range,
    Reply,
    Server,
    Txn,
    Unwatch,
    Watch,
)
from elasticrs._engine.supervise.run.agreed_step import Delivery
from elasticrs._engine.supervise.run.orders import DONE, FAILED, NOT_AGREED, delivery, joined

KEYS = Keys("job")
NODES = 3


class Change(NamedTuple):
    key: str
    value: bytes | None


class Job:
    """Simulated store, and three agents (group ranks 0 to 2), which send each other requests through it."""

    def __init__(self):
        self.kept, self.watches, self.timers = {}, {rank: set() for rank in range(NODES)}, []
        self.served, self.answers, self.pending = [], [], []
        self.round = 1
        self.agents = [self._agent(rank) for rank in range(NODES)]

    def _agent(self, rank):
        calls = Calls(
            lambda request: self._execute(rank, request),
            *(KEYS, f"agent{rank}", f"node{rank}", lambda: RoundPlace(self.round, rank, NODES)),
            lambda name, _seconds: self.timers.append((rank, name)),
        )
        calls.serve = lambda order, answer: self.served.append((rank, order, answer))
        calls.listen(1)
        return calls

    def _execute(self, rank, request):
        if isinstance(request, Watch):
            self.watches[rank].add(request.prefix)
        elif isinstance(request, Unwatch):
            self.watches[rank].discard(request.prefix)
        elif isinstance(request, Txn) and all(each.key in self.kept for each in request.compares):
            for each in request.then:
                if isinstance(each, Put):
                    self._change(each.key, each.value)
                elif isinstance(each, DeletePrefix):
                    for key in [key for key in self.kept if key.startswith(each.prefix)]:
                        self._change(key, None)
                else:
                    self._change(each.key, None)

    def _change(self, key, value):
        self.kept.pop(key, None)
        if value is not None:
            self.kept[key] = value
        for rank, prefixes in self.watches.items():
            if any(map(key.startswith, prefixes)):
                self.pending.append((rank, Change(key, value)))

    def put(self, key, value):
        self._change(key, value)
        self.deliver()

    def deliver(self):
        while self.pending:
            rank, change = self.pending.pop(0)
            assert self.agents[rank].take([change]) == []

    def ask(self, rank):
        others = self.agents[rank].others()
        self.agents[rank].ask({"do": "it", "by": rank}, others, 1.0, self.answers.append)
        self.deliver()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, NODES - 1)),
        st.tuples(st.just("answer"), st.integers(0, 9)),
        st.tuples(st.just("expire"), st.integers(0, 9)),
        st.tuples(st.just("lose"), st.integers(0, NODES - 1)),
    ),
    max_size=30,
)


@given(STEPS)
def test_each_call_ends_once_and_leaves_no_key(steps):
    job, asked = Job(), 0
    for what, number in steps:
        if what == "ask":
            job.ask(number)
            asked += 1
        elif what == "answer" and number < len(job.served):
            rank, order, answer = job.served[number]
            answer({"code": 0, "by": rank, "to": order["by"]})
        elif what == "expire" and number < len(job.timers):
            rank, name = job.timers[number]
            assert job.agents[rank].expire(name)
        elif what == "lose":
            job.agents[number].lost()
            job.agents[number].listen(1)
        job.deliver()
    for rank, name in job.timers:
        assert job.agents[rank].expire(name)
    job.deliver()
    assert len(job.answers) == asked
    assert all(found["by"] == rank for answers in job.answers for rank, found in answers.items())
    assert {(rank, order["by"]) for rank, order, _ in job.served if rank == order["by"]} == set()
    lost = [number for what, number in steps if what == "lose"]
    assert lost or not job.kept


def test_a_call_reaches_the_nodes_of_its_round_and_is_over_when_all_have_answered():
    job = Job()
    job.ask(1)
    assert [(rank, order["sender"]) for rank, order, _ in job.served] == [(0, "node1"), (2, "node1")]
    (_, _, first), (_, _, second) = job.served
    first({"a": 1})
    job.deliver()
    assert job.answers == []
    second({"b": "x" * MAX_ANSWER})
    job.deliver()
    assert job.answers[0][0] == {"a": 1}
    assert "too large" in job.answers[0][2]["message"]
    assert not job.kept
    key = f"{KEYS.calls}agent9/1"
    job.put(key, encode({"round": 2, "to": [0, 1, 2], "node": "n", "order": {}}))
    assert len(job.served) == 2


@pytest.mark.parametrize("end", ["answers", "limit", "loss", "no others"])
def test_an_error_of_a_function_that_takes_answers_ends_no_other_call_and_is_told(end):
    job = Job()
    asker, others = job.agents[0], [] if end == "no others" else [1, 2]

    def fail(_answers):
        raise RuntimeError("a defect")

    asker.ask({"do": "it"}, others, 1.0, fail)
    asker.ask({"do": "it"}, others, 1.0, job.answers.append)
    job.deliver()
    for _, _, answer in job.served if end == "answers" else ():
        answer({"code": 0})
    job.deliver()
    for _, name in job.timers if end == "limit" else ():
        assert asker.expire(name)
    if end == "loss":
        asker.lost()
    assert len(job.answers) == 1
    (trouble,) = asker.take_troubles()
    assert "RuntimeError('a defect')" in trouble
    assert asker.take_troubles() == []


@pytest.mark.parametrize(
    "value",
    [b"", b"\xff", b"[]", b"{}", b'{"round":1,"to":7,"node":"n","order":{}}', b"x" * 10_000, b"[" * 9000],
)
def test_damaged_calls_and_answers_are_ignored(value):
    job = Job()
    job.ask(0)
    job.put(f"{KEYS.calls}agent9/1", value)
    for key in ("agent0/1/1", "agent0/1/7", "agent0/1/x", "agent0/9/1", "x"):
        job.put(f"{KEYS.answers}{key}", value if value != b"{}" else b"[]")
    assert job.answers == []
    assert len(job.served) == 2


class Exchanges:
    """Agents with group ranks 0 to 2, each with a session of a real store, which exchange values."""

    def __init__(self, server):
        self.sessions = [NativeSession(Client("127.0.0.1", server.port, run_id="run")) for _ in range(NODES)]
        self.open, self.replies, self.tag = [None] * NODES, [], 0

    def begin(self, rank, value):
        self.tag += 1
        place = RoundPlace(1, rank, NODES)
        self.open[rank] = Exchange(self.sessions[rank].send, "exchange/", place, value, self.tag)

    def deliver(self, is_done, ranks=range(NODES)):
        """Deliver the store's messages to these agents until ``is_done`` returns true."""
        while not is_done():
            assert select.select([self.sessions[rank].fd for rank in ranks], [], [], HANG)[0]
            for rank in ranks:
                for event in self.sessions[rank].take():
                    self.replies.append(event)
                    if isinstance(event, Reply) and event.tag == self.open[rank]._tag:
                        self.open[rank].take_reply(event)
                    elif isinstance(event, Changes):
                        self.open[rank].take(event.changes)

    def settle(self, rank):
        """Deliver the store's messages to this agent until the store has executed all its requests. Return
        the keys of the exchanges.
        """
        self.tag += 1
        tag = self.tag
        self.sessions[rank].send(Txn(tag, [], [Range("exchange/", 0)]))

        def reply():
            return next((each for each in self.replies if isinstance(each, Reply) and each.tag == tag), None)

        self.deliver(reply, [rank])
        return [entry.key for entry in reply().results[0]]

    def values(self, ranks=range(NODES)):
        return [self.open[rank].values for rank in ranks]


@pytest.fixture
def exchanges():
    server = Server([("127.0.0.1", 0)], run_id="run")
    found = Exchanges(server)
    yield found
    # Drop all references to the sessions, because they close their last file descriptors when they are freed.
    found.open.clear()
    while found.sessions:
        found.sessions.pop().close()
    server.close()


def test_each_agent_gets_the_values_of_all_agents_in_each_of_many_exchanges(exchanges):
    for number in range(5):
        values = [f"{number} {rank}".encode() for rank in range(NODES)]
        # Let the agents begin each exchange in another order, before the others have finished the last one.
        for rank in ((number + each) % NODES for each in range(NODES)):
            if number:
                exchanges.deliver(lambda rank=rank: exchanges.open[rank].values, [rank])
            exchanges.begin(rank, values[rank])
            exchanges.settle(rank)
        exchanges.deliver(lambda: all(exchanges.values()))
        assert exchanges.values() == [values] * NODES
    assert len(exchanges.settle(0)) <= 2 * NODES + 1


def test_an_agent_that_ends_an_exchange_early_withdraws_its_value(exchanges):
    for rank in (0, 1):
        exchanges.begin(rank, b"old")
        exchanges.settle(rank)
    exchanges.open[0].end()
    exchanges.settle(0)
    exchanges.open[1].end()
    exchanges.settle(1)
    exchanges.begin(2, b"new 2")
    exchanges.settle(2)
    assert exchanges.values() == [None] * NODES
    for rank in (0, 1):
        exchanges.begin(rank, f"new {rank}".encode())
    exchanges.deliver(lambda: all(exchanges.values()))
    assert exchanges.values() == [[b"new 0", b"new 1", b"new 2"]] * NODES


def test_an_agent_without_a_value_does_not_delay_the_others(exchanges):
    for rank in range(NODES):
        exchanges.begin(rank, b"value")
    # This agent ends the exchange before the store has answered its first request.
    exchanges.open[2].end()
    assert not exchanges.open[2].is_over
    exchanges.deliver(lambda: all(exchanges.values((0, 1))) and exchanges.open[2].is_over)
    assert exchanges.values() == [[b"value", b"value", b""]] * 2 + [None]
    exchanges.begin(0, b"value")
    exchanges.open[0].lose()
    assert (exchanges.open[0].is_lost, exchanges.open[1].is_lost) == (True, False)


def sent(step, why="", ranks=2, waited=0.1):
    return delivery(ranks, Delivery(10, step, why, waited))


@pytest.mark.parametrize(
    ("parts", "code", "step", "ranks", "text"),
    [
        ([sent(9), sent(9, waited=0.3)], DONE, 9, 4, "after step 9 of this attempt, held 300.0 ms"),
        ([sent(None), sent(None)], DONE, None, 4, "sent to 4 ranks at once"),
        (
            [sent(9), sent(None, "a rank is late")],
            NOT_AGREED,
            None,
            4,
            "without an agreed step: a rank is late",
        ),
        ([sent(9), sent(10)], NOT_AGREED, None, 4, "the nodes have chosen different steps"),
        ([sent(9)], NOT_AGREED, None, 2, "another node has not answered in time"),
        ([sent(9), {"code": FAILED, "message": "no"}], NOT_AGREED, None, 2, "without an agreed step: no"),
        ([sent(9), {"code": DONE, "ranks": "x", "message": []}], NOT_AGREED, None, 2, "[]"),
        *(
            ([sent(9), {**sent(9), "message": "odd", **odd}], NOT_AGREED, None, 2, "odd")
            for odd in (
                {"waited": inf},
                {"waited": nan},
                {"waited": -1},
                {"waited": 10**400},
                {"ranks": 10**400},
                {"ranks": -1},
                {"step": True},
            )
        ),
    ],
)
def test_the_answers_of_all_nodes_about_a_signal_are_joined(parts, code, step, ranks, text):
    found = joined(parts, 2)
    assert (found["code"], found["step"], found["ranks"]) == (code, step, ranks)
    assert text in found["message"]
