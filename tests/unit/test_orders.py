"""Orders of ``elasticctl`` whose conditions change while the agent waits for other agents or the store."""

import json
from math import inf, nan
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from helpers.procs import HANG
from helpers.said import says

from elasticrs._engine.nodes.calls import RoundPlace
from elasticrs._engine.supervise import hang_diagnosis
from elasticrs._engine.supervise.run import orders
from elasticrs._engine.supervise.run.orders import DONE, FAILED, REFUSED, USAGE, Orders
from elasticrs._engine.supervise.state_machine import Phase


class Job:
    """Agent with group rank 0 of a job of three nodes. Its requests to other agents are kept in a list."""

    def __init__(self):
        self.asked, self.said, self.answers, self.stops, self.claims = [], [], [], [], []
        attempt = SimpleNamespace(running=lambda: {0: 1}, agents_round=1)
        self.place = RoundPlace(1, 0, 3)
        self.calls = SimpleNamespace(
            others=lambda: [1, 2], ask=lambda *call: self.asked.append(call), place=lambda: self.place
        )
        self.decisions = SimpleNamespace(
            phase=Phase.RUNNING,
            is_ending=False,
            calls=self.calls,
            hosts_store=False,
            claim_drain=lambda **claim: self.claims.append(claim),
        )
        self.tracker = SimpleNamespace(
            attempt=attempt,
            observers=SimpleNamespace(ordered=lambda *_: None),
            supervisor=SimpleNamespace(heartbeats=list),
        )
        agent = SimpleNamespace(ask_to_stop=lambda event, tell: self.stops.append((event, tell)))
        job = SimpleNamespace(rendezvous=SimpleNamespace(min_nodes=1), on_failure="restart")
        self.orders = Orders(agent, job, self.tracker, self.decisions, self.said.append)

    def order(self, **order):
        server = SimpleNamespace(take_orders=lambda: [(1, 0, 7, json.dumps(order))])
        server.reply = lambda _number, text, **_: self.answers.append(json.loads(text))
        self.orders.take(server)

    def reply(self, answers):
        """Pass the other agents' answers on to the function that waits for the last request."""
        self.asked[-1][3](answers)


NAMES = {1: {"code": 0, "name": "n1"}, 2: {"code": 0, "name": "n2"}}


def test_a_drain_of_another_node_is_refused_if_the_workers_end_before_the_nodes_have_answered():
    job = Job()
    job.order(do="drain", node="n1")
    job.decisions.phase = Phase.STOPPING
    job.reply(NAMES)
    assert [each["code"] for each in job.answers] == [REFUSED]
    assert len(job.asked) == 1


def test_agents_on_one_machine_have_names_of_their_own_for_a_drain():
    job = Job()
    answers = {1: {"code": 0, "name": "one-host"}, 2: {"code": 0, "name": "one-host"}}
    job.order(do="drain", node="one-host")
    job.reply(answers)
    (told,) = job.answers
    assert told["code"] == USAGE
    says(told["message"], "2 nodes are named one-host", "one-host:1", "one-host:2")
    job.order(do="drain", node="one-host:2")
    job.reply(answers)
    assert list(job.asked[-1][1]) == [2]


@pytest.mark.parametrize(
    ("place", "text"), [(RoundPlace(2, 0, 2), "have met again"), (None, "about to meet again")]
)
def test_a_drain_of_another_node_is_refused_if_group_ranks_may_have_changed_meanwhile(place, text):
    job = Job()
    job.order(do="drain", node="n2")
    job.place = place
    job.reply(NAMES)
    (told,) = job.answers
    assert (told["code"], text in told["message"]) == (REFUSED, True)
    assert len(job.asked) == 1


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (None, FAILED),
        ({}, FAILED),
        ({"code": None, "message": "another program runs the agent"}, FAILED),
        ({"code": "x", "message": []}, FAILED),
        ({"code": 77, "message": "m"}, FAILED),
        ({"code": DONE, "message": "m"}, DONE),
        ({"code": REFUSED, "message": "m"}, REFUSED),
    ],
)
def test_the_answer_of_a_drained_node_has_an_exit_code_and_a_text(answer, code):
    job = Job()
    job.order(do="drain", node="n1")
    job.reply(NAMES)
    job.reply({} if answer is None else {1: answer})
    (told,) = job.answers
    assert told["code"] == code
    assert isinstance(told["message"], str)


@pytest.mark.parametrize(
    ("is_first", "phase", "code", "text"),
    [
        (True, Phase.RUNNING, None, "leaves the job"),
        (True, Phase.STOPPING, REFUSED, "no workers are running now"),
        (False, Phase.RUNNING, REFUSED, "being drained"),
        (None, Phase.RUNNING, REFUSED, "the connection to the store"),
    ],
)
def test_a_node_leaves_only_if_the_store_has_recorded_it_and_workers_still_run(is_first, phase, code, text):
    job = Job()
    job.order(do="drain", node="0", stay_out=True)
    (claim,) = job.claims
    assert claim["stays_out"]
    job.decisions.phase = phase
    assert claim["take"](is_first) == (code is None)
    (told,) = job.answers
    assert told.get("code") == code
    assert text in told["message"]
    assert len(job.stops) == (code is None)


def test_an_error_in_an_order_is_answered_and_told():
    job = Job()
    del job.calls.place
    job.order(do="drain", node="n1")
    assert [each["code"] for each in job.answers] == [FAILED]
    assert "AttributeError" in job.said[-1]


WORKER = {
    "rank": 1,
    "local_rank": 0,
    "role_rank": 1,
    "pid": 7,
    "state": "RUNNING",
    "exitcode": None,
    "was_stopped": False,
}
WORKER |= {"training": None, "progress": None, "late": None, "has_recorder": None}
PROGRESS = {"step": 3, "counts": "keep", "age_seconds": 0.5}
LATE = {"times": 9, "of": 10, "operation": "all_reduce", "lag_ms": 1.5, "may_wait": False}


@pytest.mark.parametrize(
    ("change", "is_shown"),
    [
        ({}, True),
        ({"rank": None, "exitcode": -9, "state": "EXITED", "progress": PROGRESS}, True),
        ({"progress": {**PROGRESS, "age_seconds": None, "other": 1}, "other": 1}, True),
        ({"rank": "1"}, False),
        ({"pid": None}, False),
        ({"pid": 1.5}, False),
        ({"state": "\ud800"}, False),
        ({"state": []}, False),
        ({"was_stopped": True}, True),
        ({"was_stopped": 1}, False),
        ({"exitcode": "x"}, False),
        ({"exitcode": True}, False),
        ({"late": LATE, "has_recorder": True}, True),
        ({"late": {**LATE, "lag_ms": nan}}, False),
        ({"late": {**LATE, "operation": "x" * 10_000}}, False),
        ({"late": {}}, False),
        ({"has_recorder": 0}, False),
        ({"progress": "x"}, False),
        ({"progress": {}}, False),
        ({"progress": {**PROGRESS, "step": None}}, False),
        ({"progress": {**PROGRESS, "counts": 1}}, False),
        *(({"progress": {**PROGRESS, "age_seconds": age}}, False) for age in (inf, nan, -1, 10**400, "x")),
    ],
)
def test_the_workers_of_another_node_are_shown_if_all_their_fields_are_right(change, is_shown):
    job = Job()
    job.tracker.attempt.running = dict
    job.order(do="others")
    node = {"code": DONE, "node": "n1", "workers": [{**WORKER, **change}]}
    job.reply({1: node, 2: {"code": DONE, "node": "n2", "workers": [WORKER]}})
    (told,) = job.answers
    expected = {name: {**WORKER, **change}[name] for name in WORKER}
    if expected["progress"]:
        expected["progress"] = {name: expected["progress"][name] for name in PROGRESS} if is_shown else None
    shown = {each["node"]: each["workers"] for each in told["others"]}
    assert shown == {**({"n1": [expected]} if is_shown else {}), "n2": [WORKER]}


@pytest.mark.parametrize("workers", [None, {}, "x", [None], [[]]])
def test_a_node_that_tells_no_list_of_workers_is_not_shown(workers):
    job = Job()
    job.tracker.attempt.running = dict
    job.order(do="others")
    job.reply({1: {"code": DONE, "node": "n1", "workers": workers}, 2: {"node": 1, "workers": []}})
    assert [each["others"] for each in job.answers] == [[]]


def test_an_agent_without_workers_tells_the_others_that_it_has_none():
    job = Job()
    job.tracker.attempt = None
    job.orders.take_call({"do": "ranks", "sender": "n1"}, job.answers.append)
    assert [(each["code"], each["workers"]) for each in job.answers] == [(DONE, [])]


def test_all_that_ask_during_a_search_for_late_ranks_get_its_result(monkeypatch):
    job, begun, found, done = Job(), SimpleQueue(), SimpleQueue(), SimpleQueue()
    job.decisions.calls = None

    def look(_attempt, _seconds):
        begun.put(None)
        return found.get(timeout=HANG)

    monkeypatch.setattr(hang_diagnosis, "look_for_late", look)
    for _ in range(3):
        job.orders.ask_others(lambda: done.put(job.tracker.attempt.look))
    begun.get(timeout=HANG)
    job.orders.ask_others(lambda: done.put(job.tracker.attempt.look))
    found.put("found")
    assert [done.get(timeout=HANG) for _ in range(4)] == ["found"] * 4
    job.orders.ask_others(lambda: done.put("at once"))
    assert done.get_nowait() == "at once"


def test_late_ranks_are_looked_for_at_most_every_ten_seconds_and_once_more_in_another_attempt(monkeypatch):
    job, looks, done = Job(), SimpleQueue(), SimpleQueue()
    clock = [100.0]
    monkeypatch.setattr(orders.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(hang_diagnosis, "look_for_late", lambda attempt, _: looks.put(attempt))
    job.decisions.calls = None

    def asks():
        job.orders.ask_others(lambda: done.put(None))
        done.get(timeout=HANG)
        return looks.qsize()

    assert [asks(), asks()] == [1, 1]
    clock[0] += orders.LOOK_PERIOD
    assert [asks(), asks()] == [2, 2]
    job.tracker.attempt = SimpleNamespace(running=lambda: {0: 1}, agents_round=1)
    assert [asks(), asks()] == [3, 3]
    clock[0] += orders.LOOK_PERIOD
    job.tracker.attempt.running = dict
    assert asks() == 3
