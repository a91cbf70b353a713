"""Tests for the memory page that an agent shares with workers that use ``elasticrs.train``."""

import os
import re
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.job import phrases
from elasticrs._engine.workers.node_page import VARIABLE, AgentPage, CheckpointRequests, page_of


@pytest.fixture
def page():
    with closing(AgentPage(3)) as found:
        yield found


def worker(page, local_rank):
    found = page_of({VARIABLE: page.variable, "LOCAL_RANK": str(local_rank)})
    assert found is not None
    return found


def test_worker_data_are_read_by_local_rank(page):
    assert page.standings() == []
    first, last = worker(page, 0), worker(page, 2)
    last.place(5, 8, 3)
    assert [last.stepped() for _ in range(3)] == [True, False, False], "a rate each second is enough"
    last.tell_rate(2.5)
    own, other = page.standings()
    assert (own.local_rank, own.pid, own.rank, own.steps, own.rate) == (0, os.getpid(), None, 0, None)
    assert (other.local_rank, other.rank, other.world_size, other.round) == (2, 5, 8, 3)
    assert (other.steps, other.rate) == (3, 2.5)
    assert other.step_ns > 0
    first.place(0, 8, 3)
    assert page.standings()[0].rank == 0


def test_the_final_world_size_is_known_when_all_workers_have_finished(page):
    first, last = worker(page, 0), worker(page, 2)
    assert page.final_world_size() is None
    for each in (first, last):
        each.place(0, 8, 3)
    first.finish()
    assert page.final_world_size() is None
    last.finish()
    assert page.final_world_size() == 8


def test_a_replacement_worker_starts_with_empty_data(page):
    worker(page, 1).tell_rate(9.0)
    worker(page, 1)
    (found,) = page.standings()
    assert (found.steps, found.rate) == (0, None)


def test_a_cleared_slot_is_empty(page):
    worker(page, 0)
    worker(page, 1).place(3, 4, 1)
    page.clear(1)
    assert [each.local_rank for each in page.standings()] == [0]


def test_a_checkpoint_request_stays_open_for_a_replacement_worker(page):
    page.ask()
    assert worker(page, 0).is_asked
    again = worker(page, 0)
    assert again.is_asked
    again.serve(again.asked, "saved")
    assert not again.is_asked
    assert not worker(page, 1).is_asked, "it is served for all workers of the node"


@given(st.lists(st.sampled_from(["ask", "begin", "end"]), max_size=30))
def test_a_checkpoint_save_answers_only_requests_made_before_its_start(moves):
    with closing(AgentPage(1)) as page:
        own = worker(page, 0)
        asked = served = 0
        begun = None
        for move in moves:
            if move == "ask":
                asked = page.ask()
            elif move == "begin":
                begun = own.asked
            elif begun is not None:
                own.serve(begun, "saved")
                served, begun = max(served, begun), None
            assert page.answer()[0] == served
            assert own.is_asked == (asked > served)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"LOCAL_RANK": "0"},
        {"LOCAL_RANK": "0", VARIABLE: "nonsense"},
        {"LOCAL_RANK": "0", VARIABLE: f"1:/proc/{os.getpid()}/fd/999999"},
        {"LOCAL_RANK": "0", VARIABLE: "1:/dev/null"},
        {"LOCAL_RANK": "0", VARIABLE: f"1:{__file__}"},
    ],
)
def test_an_invalid_page_variable_gives_no_page(environ):
    assert page_of(environ) is None


def test_a_page_of_another_agent_or_with_too_few_slots_is_rejected(page):
    mark, _, path = page.variable.partition(":")
    assert page_of({VARIABLE: f"{int(mark) + 1}:{path}", "LOCAL_RANK": "0"}) is None
    assert page_of({VARIABLE: page.variable, "LOCAL_RANK": "3"}) is None


@pytest.fixture
def requests():
    lines = []
    with closing(CheckpointRequests(2, lines.append)) as found:
        yield found, lines


def test_overlapping_checkpoint_requests_are_reported_in_one_line(requests):
    asking, lines = requests
    own = worker(asking.page, 0)
    asking.ask()
    asking.ask()
    assert asking.are_open
    asking.look()
    assert lines == []
    own.serve(own.asked, "saved")
    asking.look()
    asking.look()
    assert not asking.are_open
    (line,) = lines
    assert re.match(r"checkpoint saved [\d.]+ ms ", line)


def test_each_checkpoint_request_has_its_own_answer(requests):
    asking, lines = requests
    own = worker(asking.page, 1)
    for result in ("failed", "no manager"):
        asking.ask()
        own.serve(own.asked, result)
        asking.look()
    assert lines == [phrases.checkpoint_line("failed", 0), phrases.checkpoint_line("no manager", 0)]


def test_a_checkpoint_request_that_no_worker_answers_is_reported_once(requests, monkeypatch):
    asking, lines = requests
    monkeypatch.setattr("elasticrs._engine.workers.node_page.PATIENCE", 0.0)
    asking.ask()
    asking.look()
    asking.look()
    (line,) = lines
    assert "none of its workers" in line
    own = worker(asking.page, 0)
    own.serve(own.asked, "saved")
    asking.look()
    assert len(lines) == 2
