"""The restart policy: budgets, delays and properties. ``tests/verdicts`` has the cases of whole failures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs.job.failure_cause import Cause, Permanence
from elasticrs.job.restart_policy import (
    TRANSIENT,
    Evidence,
    FailureHistory,
    RestartDecision,
    RestartSettings,
    StopKind,
    decide,
)

PLENTY = RestartSettings(max_restarts=1000, max_same_failures=3)


def failure(**facts: object) -> Cause:
    known = {"node": "node1", "rank": 3, "exception": "builtins.ValueError", "place": "train.py:88", **facts}
    return Cause(**known)


def decisions(
    settings: RestartSettings,
    causes: list[Cause],
    *,
    seconds_apart: float = 1.0,
    ran: float | None = 1.0,
    jitter: float = 0.0,
) -> list[RestartDecision]:
    """Decide about failures of attempts that follow each other, until one stops the job."""
    history, found = FailureHistory(), []
    for index, cause in enumerate(causes):
        evidence = Evidence((cause,), now=index * seconds_apart, ran=ran, jitter=jitter)
        decision = decide(settings, history, evidence)
        found.append(decision)
        if decision.stop is not None:
            break
        history = decision.history
    return found


def stops(found: list[RestartDecision]) -> tuple[int, StopKind | None]:
    """Return the number of restarts, and the kind of the stop."""
    return len(found) - (found[-1].stop is not None), found[-1].stop


class TestFailures:
    def test_an_unknown_kind_of_another_release_is_no_reason_to_stop(self):
        assert stops(decisions(PLENTY, [failure(permanence="curse")])) == (1, None)

    @pytest.mark.parametrize(
        "other",
        [
            failure(exception="builtins.KeyError"),
            failure(place="train.py:89"),
            failure(rank=4, reached=5),
            failure(exception=None),
            failure(place=None),
        ],
        ids=["exception", "place", "rank and step", "no exception", "no place"],
    )
    def test_a_different_failure_starts_the_count_again(self, other):
        same = failure(reached=7)
        assert stops(decisions(PLENTY, [same, same, other, same, same])) == (5, None)

    @pytest.mark.parametrize("exception", sorted(TRANSIENT))
    def test_errors_of_connections_never_count_as_equal(self, exception):
        assert stops(decisions(PLENTY, [failure(exception=exception)] * 9)) == (9, None)

    def test_an_attempt_of_unknown_duration_is_no_progress(self):
        assert stops(decisions(PLENTY, [failure()] * 9, ran=None)) == (2, StopKind.PERMANENT)


class TestBudget:
    @pytest.mark.parametrize("most", [0, 1, 5])
    def test_the_job_stops_when_the_budget_is_used_up(self, most):
        found = decisions(RestartSettings(most), [Cause(exitcode=1)] * 10)
        assert stops(found) == (most, StopKind.EXHAUSTED)

    def test_the_budget_of_a_window_returns_when_the_window_has_passed(self):
        settings = RestartSettings(3, window=10.0)
        assert stops(decisions(settings, [Cause()] * 50, seconds_apart=4.0)) == (50, None)
        assert stops(decisions(settings, [Cause()] * 50, seconds_apart=3.0)) == (3, StopKind.EXHAUSTED)

    def test_the_count_of_restarts_never_decreases(self):
        found = decisions(RestartSettings(3, window=10.0), [Cause()] * 20, seconds_apart=9.0)
        assert [each.history.charged for each in found] == list(range(1, 21))


class TestDelay:
    SLOW = RestartSettings(100, first_delay=1.0, longest_delay=60.0)

    def test_the_delay_doubles_up_to_the_longest(self):
        found = decisions(self.SLOW, [Cause()] * 9)
        assert [each.delay for each in found] == [1, 2, 4, 8, 16, 32, 60, 60, 60]

    def test_progress_resets_the_delay(self):
        found = decisions(self.SLOW, [Cause(reached=step) for step in (1, 1, 1, 2, 2)])
        assert [each.delay for each in found] == [1, 2, 4, 1, 2]

    def test_there_is_no_delay_by_default(self):
        assert {each.delay for each in decisions(RestartSettings(9), [Cause()] * 9)} == {0}

    def test_a_thousand_failures_overflow_nothing(self):
        assert decisions(self.SLOW.replaced(max_restarts=2000), [Cause()] * 1500)[-1].delay == 60

    @given(st.floats(0, 1), st.integers(1, 20))
    def test_jitter_shortens_a_delay_by_at_most_a_half(self, jitter, failures):
        full = decisions(self.SLOW, [Cause()] * failures)[-1].delay
        assert full / 2 <= decisions(self.SLOW, [Cause()] * failures, jitter=jitter)[-1].delay <= full


CAUSES = st.builds(
    Cause,
    node=st.sampled_from(["node1", "node2", "node3"]),
    rank=st.none() | st.integers(0, 7),
    exception=st.sampled_from([None, "builtins.ValueError", "builtins.KeyError"]),
    place=st.sampled_from([None, "train.py:8", "model.py:9"]),
    reached=st.none() | st.integers(0, 3),
    permanence=st.sampled_from([None, *(each.value for each in Permanence)]),
    permanent_rank=st.none() | st.integers(0, 7),
    permanent_sign=st.just("sign"),
)


@given(
    CAUSES,
    st.lists(CAUSES, max_size=4, unique_by=lambda cause: (cause.node, cause.permanent_rank)),
    st.data(),
)
def test_the_order_of_the_reports_does_not_matter(first, others, data):
    history = FailureHistory(charged=1, last=("builtins.ValueError", "train.py:8", 1, 2), same=2, reached=2)
    shuffled = data.draw(st.permutations(others))
    one, other = (
        decide(PLENTY, history, Evidence((first, *rest), nodes=2, now=5.0, ran=1.0, jitter=0.5))
        for rest in (others, shuffled)
    )
    assert one == other


@given(st.lists(CAUSES, max_size=30), st.integers(0, 5))
def test_restarts_are_counted_and_never_exceed_the_budget(causes, most):
    found = decisions(RestartSettings(most, max_same_failures=2), causes)
    restarts = [each for each in found if each.stop is None]
    assert len(restarts) <= most
    assert [each.history.charged for each in restarts] == list(range(1, len(restarts) + 1))


@given(st.integers(1, 5), st.floats(1, 100), st.lists(st.floats(0, 60), max_size=60))
def test_no_span_as_long_as_the_window_contains_more_restarts_than_allowed(most, window, gaps):
    settings, history, now = RestartSettings(most, window=window), FailureHistory(), 1e9
    restarted: list[float] = []
    for gap in gaps:
        now += gap
        decision = decide(settings, history, Evidence((Cause(exitcode=1),), now=now))
        if decision.stop is None:
            history = decision.history
            restarted.append(now)
            assert sum(at > now - window for at in restarted) <= most
            assert len(history.charged_at) <= most
