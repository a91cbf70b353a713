"""Tests for which workers are reported as slow, and when."""

import re
from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.supervise.observe import slow_workers
from elasticrs._engine.supervise.observe.slow_workers import (
    INTERVAL,
    NO_SLOW_WORKERS,
    SPAN,
    THRESHOLD,
    SlowWorkerCheck,
    check,
    slowest,
)
from elasticrs._engine.workers.node_page import Standing


def standing(local_rank, rate, pid=None):
    return Standing(local_rank, pid or 100 + local_rank, local_rank, 4, 1, 5, 1, rate)


def of(*rates):
    return [standing(local_rank, rate) for local_rank, rate in enumerate(rates)]


rates = st.lists(st.none() | st.floats(0.1, 1000), max_size=8)


@given(rates)
def test_the_slowest_worker_has_the_lowest_rate(found):
    told = [each for each in found if each is not None]
    result = slowest(of(*found))
    if len(told) < 2:
        assert result is None
    else:
        worker, middle = result
        assert worker.rate == min(told)
        assert middle == median(told)


@given(st.lists(rates, max_size=40))
def test_a_rank_that_is_slow_at_every_check_is_reported_once(looks):
    before, past, told = NO_SLOW_WORKERS, [], set()
    for number, found in enumerate(looks):
        standings = of(*found)
        before, news = check(before, standings, number * INTERVAL)
        known = [each.rate for each in standings if each.rate is not None]
        limit = THRESHOLD * median(known) if len(known) > 1 else 0
        slow = {each.pid for each in standings if each.rate is not None and each.rate < limit}
        past.append(slow)
        told &= slow
        span = int(SPAN / INTERVAL) + 1
        long = set.intersection(*past[-span:]) if len(past) >= span else set()
        assert {each.pid for each in news} == long - told
        told |= long


def test_a_slow_worker_is_reported_after_60_s_and_again_after_a_recovery():
    slow, well = of(10, 10, 10, 7), of(10, 10, 10, 9)
    before, told = NO_SLOW_WORKERS, []
    now = 0.0
    for standings, looks in ((slow, 20), (well, 1), (slow, 12), (slow, 1)):
        for _ in range(looks):
            before, news = check(before, standings, now)
            told += [(now, each.local_rank) for each in news]
            now += INTERVAL
    assert told == [(60.0, 3), (165.0, 3)]


def test_slowness_of_a_worker_does_not_count_for_its_replacement():
    before, _ = check(NO_SLOW_WORKERS, of(10, 10, 1), 0.0)
    again = [*of(10, 10), standing(2, 1, pid=999)]
    _, news = check(before, again, SPAN)
    assert news == []


class Page:
    def __init__(self, *looks):
        self.looks = list(looks)

    def standings(self):
        return self.looks.pop(0)


def test_a_check_runs_when_due_and_reports_the_slow_rank(monkeypatch):
    clock, lines, told = [0.0], [], []
    monkeypatch.setattr(slow_workers.time, "monotonic", lambda: clock[0])
    page = Page([], *[of(10, 10, 5)] * 13)
    watched = SlowWorkerCheck(page, lines.append, told.append)
    for moment in (1.0, 2.0, *(6.0 + INTERVAL * each for each in range(13))):
        clock[0] = moment
        watched.look()
    assert page.looks == []
    assert told == [of(10, 10, 5)] * 13
    (line,) = lines
    assert re.search(r"^rank 2 \(pid 102\) .*\b60 s\b.*\b5\b.*\b10$", line)
