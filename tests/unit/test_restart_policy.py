"""Tests for the restart policy: budgets, delays and properties. ``tests/verdicts`` tests complete
failures.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.inside.keep.file import DamagedCopyError
from elasticrs._engine.job.restart_policy import (
    DAMAGED,
    MAX_SUSPECTS,
    STEADY,
    UNPROVEN,
    Cause,
    Evidence,
    FailureHistory,
    Permanence,
    RestartDecision,
    RestartSettings,
    Verdict,
    decide,
    exclude,
    is_suspect,
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
    """Return the decisions about consecutive failures, up to the first decision that stops the job."""
    history, found = FailureHistory(), []
    for index, cause in enumerate(causes):
        evidence = Evidence((cause,), now=index * seconds_apart, ran=ran, jitter=jitter)
        decision = decide(settings, history, evidence)
        found.append(decision)
        if decision.stop is not None:
            break
        history = decision.history
    return found


def stops(found: list[RestartDecision]) -> tuple[int, Verdict | None]:
    """Return the number of restarts, and the kind of stop; `None` if the job is not stopped."""
    return len(found) - (found[-1].stop is not None), found[-1].stop


def test_damaged_copies_do_not_count_as_the_same_failure():
    assert f"{DamagedCopyError.__module__}.{DamagedCopyError.__qualname__}" == DAMAGED
    once = RestartSettings(max_restarts=5, max_same_failures=1)
    assert stops(decisions(once, [failure(exception=DAMAGED)] * 9)) == (5, Verdict.FAILED)
    assert stops(decisions(once, [failure(exception=DAMAGED), failure()])) == (1, Verdict.PERMANENT)


class TestFailures:
    def test_an_unknown_failure_kind_from_another_release_does_not_stop_the_job(self):
        assert stops(decisions(PLENTY, [failure(permanence="curse")])) == (1, None)

    @pytest.mark.parametrize(
        "other",
        [
            failure(exception="builtins.KeyError"),
            failure(place="train.py:89"),
            failure(rank=4, reached=5, is_global=True),
            failure(exception=None),
            failure(place=None),
        ],
        ids=["exception", "place", "rank and step", "no exception", "no place"],
    )
    def test_a_different_failure_resets_the_count_of_same_failures(self, other):
        same = failure(reached=7, is_global=True)
        assert stops(decisions(PLENTY, [same, same, other, same, same])) == (5, None)

    def test_connection_errors_never_count_as_the_same_failure(self):
        assert stops(decisions(PLENTY, [failure(is_transient=True)] * 30)) == (30, None)

    @pytest.mark.parametrize(
        "steps",
        [{"reached": 62}, {"reached": 62, "frame": "f"}],
        ids=["optimizer steps or steps of an epoch", "with a frame"],
    )
    def test_steps_that_restart_with_each_attempt_prove_nothing_about_the_place(self, steps):
        # First, each attempt runs for a minute. Then, the attempts fail in different steps.
        assert stops(decisions(PLENTY, [failure(ran=STEADY, **steps)] * 30)) == (30, None)
        others = [failure(**{**steps, "reached": 62 - number % 3}) for number in range(30)]
        assert stops(decisions(PLENTY, others)) == (30, None)

    def test_equal_failures_after_unproven_steps_end_the_job_later(self):
        assert stops(decisions(PLENTY, [failure(reached=19)] * 30)) == (
            PLENTY.max_same_failures * UNPROVEN - 1,
            Verdict.PERMANENT,
        )

    @pytest.mark.parametrize(
        "what",
        [
            {"exception": None, "silence": 4.0, "place": "f (train.py:5)"},
            {"exception": None, "exitcode": -11, "place": None},
        ],
        ids=["hang", "SIGSEGV"],
    )
    def test_the_same_hang_or_crash_in_the_same_step_ends_the_job(self, what):
        windowed = RestartSettings(max_restarts=3, window=10.0, max_same_failures=3)
        for same, most in (
            (failure(reached=5, is_global=True, ran=100.0, **what), 3),
            (failure(reached=5, ran=1.0, **what), 3 * UNPROVEN),
        ):
            found = decisions(windowed, [same] * 30, seconds_apart=60.0, ran=100.0)
            assert stops(found) == (most - 1, Verdict.PERMANENT)
            assert "step 5" in found[-1].reason
        assert stops(decisions(PLENTY, [failure(reached=5, ran=STEADY, **what)] * 30)) == (30, None)

    def test_a_hang_whose_place_is_unknown_equals_the_others_in_the_same_step(self):
        hang = failure(exception=None, silence=4.0, place="f (train.py:5)", reached=5, is_global=True)
        assert stops(decisions(PLENTY, [hang, hang.replaced(place=None), hang])) == (2, Verdict.PERMANENT)

    @pytest.mark.parametrize("code", [-9, -15, 1, None])
    def test_exit_codes_and_signals_of_other_processes_never_count_as_the_same_failure(self, code):
        same = failure(exception=None, exitcode=code, reached=5, is_global=True)
        assert stops(decisions(PLENTY, [same] * 30)) == (30, None)

    @pytest.mark.parametrize("nodes", [1, 2])
    def test_a_start_error_is_permanent_only_if_no_attempt_got_past_the_start(self, nodes):
        missing = failure(exception="builtins.ModuleNotFoundError", place="train.py:1", **BROKEN_MOUNT)
        both = [missing, missing.replaced(node="node2")][:nodes]
        failed = decide(PLENTY, FailureHistory(), Evidence((Cause(exitcode=-9),), nodes=nodes))
        stopped = decide(PLENTY, FailureHistory(), Evidence(tuple(both), nodes=nodes))
        assert (failed.stop, stopped.stop) == (None, Verdict.PERMANENT)
        history = failed.history
        for _ in range(30):
            decision = decide(PLENTY, history, Evidence(tuple(both), nodes=nodes))
            assert decision.stop is None
            history = decision.history

    def test_a_round_that_ended_for_another_reason_after_a_minute_has_got_past_the_start(self):
        history = exclude(PLENTY, FailureHistory(), Evidence(nodes=2, ran=STEADY)).history
        assert history.has_started
        assert not exclude(PLENTY, FailureHistory(), Evidence(nodes=2, ran=1.0)).history.has_started

    def test_an_attempt_of_unknown_duration_does_not_count_as_progress(self):
        assert stops(decisions(PLENTY, [failure()] * 9, ran=None)) == (2, Verdict.PERMANENT)


class TestRestartBudget:
    @pytest.mark.parametrize("most", [0, 1, 5])
    def test_the_job_stops_when_the_budget_is_used_up(self, most):
        found = decisions(RestartSettings(most), [Cause(exitcode=1)] * 10)
        assert stops(found) == (most, Verdict.FAILED)

    def test_restarts_become_available_again_after_the_window(self):
        settings = RestartSettings(3, window=10.0)
        assert stops(decisions(settings, [Cause()] * 50, seconds_apart=4.0)) == (50, None)
        assert stops(decisions(settings, [Cause()] * 50, seconds_apart=3.0)) == (3, Verdict.FAILED)

    def test_the_count_of_restarts_never_decreases(self):
        found = decisions(RestartSettings(3, window=10.0), [Cause()] * 20, seconds_apart=9.0)
        assert [each.history.charged for each in found] == list(range(1, 21))


class TestRestartDelay:
    SLOW = RestartSettings(100, first_delay=1.0, longest_delay=60.0)

    def test_the_delay_doubles_up_to_the_maximum(self):
        found = decisions(self.SLOW, [Cause()] * 9)
        assert [each.delay for each in found] == [1, 2, 4, 8, 16, 32, 60, 60, 60]

    def test_progress_resets_the_delay(self):
        found = decisions(self.SLOW, [Cause(reached=step, is_global=True) for step in (1, 1, 1, 2, 2)])
        assert [each.delay for each in found] == [1, 2, 4, 1, 2]

    def test_there_is_no_delay_by_default(self):
        assert {each.delay for each in decisions(RestartSettings(9), [Cause()] * 9)} == {0}

    def test_a_thousand_failures_do_not_overflow_the_delay(self):
        assert decisions(self.SLOW.replaced(max_restarts=2000), [Cause()] * 1500)[-1].delay == 60

    @given(st.floats(0, 1), st.integers(1, 20))
    def test_jitter_shortens_the_delay_by_at_most_half(self, jitter, failures):
        full = decisions(self.SLOW, [Cause()] * failures)[-1].delay
        assert full / 2 <= decisions(self.SLOW, [Cause()] * failures, jitter=jitter)[-1].delay <= full


LIMITED = PLENTY.replaced(max_excluded_nodes=3)
BROKEN_MOUNT = {
    "permanence": "start_error",
    "permanent_rank": 1,
    "permanent_sign": "ImportError at train.py:3",
}


def excluded(settings: RestartSettings, *failures: Evidence) -> list[str | None]:
    """Return the node that is excluded after each failure; `None` where no node is excluded."""
    history, found = FailureHistory(), []
    for evidence in failures:
        decision = decide(settings, history, evidence)
        assert decision.stop is None, decision
        found.append(decision.exclude)
        assert ("is excluded from the job" in decision.note) == (decision.exclude is not None)
        history = decision.history
    return found


def evidence(*unfit: str, nodes: int = 4, available: int = 4, **more: object) -> Evidence:
    found = tuple((node, f"the check of {node} failed") for node in unfit)
    known = {"causes": (Cause(exitcode=1),), "ran": 1.0, "min_nodes": 1, **more}
    return Evidence(nodes=nodes, available=available, unfit=found, **known)


class TestNodeExclusion:
    def test_a_node_that_fails_its_check_is_excluded_immediately(self):
        decision = decide(LIMITED, FailureHistory(), evidence("node2"))
        assert (decision.exclude, decision.history.excluded, decision.history.charged) == ("node2", 1, 1)
        assert decision.note == "node node2 is excluded from the job: the check of node2 failed"

    def test_a_node_is_excluded_after_its_second_start_error(self):
        starts = evidence(causes=(failure(node="node3", exception=None, **BROKEN_MOUNT),))
        assert excluded(LIMITED, starts, starts) == [None, "node3"]
        assert "again" in decide(LIMITED, FailureHistory(), starts).note

    def test_the_same_start_error_on_two_nodes_is_permanent(self):
        one, other = (failure(node=node, **BROKEN_MOUNT) for node in ("node1", "node2"))
        history = decide(LIMITED, FailureHistory(), evidence(causes=(one,))).history
        decision = decide(LIMITED, history, evidence(causes=(other,)))
        assert (decision.stop, decision.exclude, decision.note) == (Verdict.PERMANENT, None, "")
        assert "node1 and node2" in decision.reason
        moved = failure(node="node2", **{**BROKEN_MOUNT, "permanent_sign": "exit code 2"})
        assert decide(LIMITED, history, evidence(causes=(moved,))).stop is None

    def test_a_start_error_in_a_single_node_job_implicates_no_node(self):
        alone = evidence(nodes=1, causes=(failure(**BROKEN_MOUNT),))
        decision = decide(LIMITED, FailureHistory(), alone)
        assert (decision.stop, decision.history.implicated) == (Verdict.PERMANENT, ())

    def test_one_node_is_excluded_at_a_time_preferring_one_implicated_twice(self):
        assert excluded(LIMITED, evidence("node2", "node1"), evidence("node3", "node2")) == ["node1", "node2"]

    def test_a_failed_check_takes_precedence_over_a_start_error(self):
        starts = evidence(causes=(failure(node="node1", exception=None, **BROKEN_MOUNT),))
        both = starts.replaced(unfit=(("node2", "the check failed"),))
        assert excluded(LIMITED, both, starts) == ["node2", "node1"]

    def test_an_exclusion_resets_the_count_of_same_failures(self):
        unfit = evidence("node1", causes=(failure(),))
        fit = evidence(causes=(failure(),))
        assert excluded(LIMITED, fit, fit, unfit, fit, fit) == [None, None, "node1", None, None]

    @pytest.mark.parametrize(
        ("settings", "found", "word"),
        [
            (LIMITED, evidence("node1", available=3, min_nodes=3), "fewer than 3"),
            (LIMITED, evidence("node1", "node2", "node3"), "3 of 4"),
            (LIMITED, evidence("node1", "node2", nodes=2), "2 of 2"),
            (
                LIMITED,
                evidence("node1", bound=(("node1", "2 agents have this name"),)),
                "2 agents have this name",
            ),
            (LIMITED.replaced(max_excluded_nodes=1), evidence("node1", "node2"), "max_excluded_nodes=1"),
            (LIMITED.replaced(max_excluded_nodes=0), evidence("node1"), "max_excluded_nodes=0"),
        ],
        ids=["too few", "most", "both", "bound", "too many", "off"],
    )
    def test_no_node_is_excluded_beyond_the_limits_and_the_reason_is_noted(self, settings, found, word):
        decision = decide(settings, FailureHistory(), found)
        assert (decision.stop, decision.exclude, decision.history.excluded) == (None, None, 0)
        assert "node1" in decision.note
        assert word in decision.note

    def test_a_note_about_many_unfit_nodes_is_abbreviated(self):
        names = [f"node{number}" for number in range(1000)]
        note = decide(LIMITED, FailureHistory(), evidence(*names, nodes=1000, available=1000)).note
        assert "and 992 more" in note
        assert len(note) < 300

    def test_another_unfit_node_is_excluded_if_the_first_cannot_be(self):
        bound = (("node1", "2 agents have this name"),)
        assert excluded(LIMITED, evidence("node1", "node2", bound=bound)) == ["node2"]

    def test_an_unfit_node_without_other_nodes_ends_the_job(self):
        decision = decide(LIMITED, FailureHistory(), evidence("node1", nodes=1, available=1))
        assert (decision.stop, decision.exclude) == (Verdict.UNFIT, None)
        assert "node1" in decision.reason
        assert decide(PLENTY, FailureHistory(), evidence("node1", nodes=1, available=1)).stop is None

    def test_equal_start_errors_of_one_node_that_has_to_stay_are_not_permanent(self):
        starts = evidence(
            causes=(failure(node="node3", exception="ImportError", **BROKEN_MOUNT),), min_nodes=4
        )
        history = FailureHistory()
        for _ in range(2):
            history = decide(LIMITED, history, starts).history
        decision = decide(LIMITED, history, starts)
        assert (decision.stop, decision.exclude) == (Verdict.UNFIT, None)
        assert "node3" in decision.reason
        assert is_suspect(decision.history, "node3")
        assert not is_suspect(decision.history, "node1")

    def test_an_implicated_node_is_kept_in_the_history_of_a_job_that_ends(self):
        starts = evidence(causes=(failure(node="node3", exception=None, **BROKEN_MOUNT),))
        once = LIMITED.replaced(max_restarts=1)
        decision = decide(once, decide(once, FailureHistory(), starts).history, starts)
        assert (decision.stop, decision.history.excluded) == (Verdict.FAILED, 0)
        assert is_suspect(decision.history, "node3")

    def test_the_only_node_of_a_round_is_excluded_if_there_is_a_spare(self):
        assert excluded(LIMITED, evidence("node1", nodes=1, available=2)) == ["node1"]

    @pytest.mark.parametrize("settings", [PLENTY, LIMITED])
    def test_no_note_is_written_if_the_job_stops_or_exclusion_is_off(self, settings):
        found = evidence("node1")
        if settings is LIMITED:
            found = found.replaced(causes=(failure(permanence="exit_code", permanent_sign="exit code 3"),))
        decision = decide(settings, FailureHistory(), found)
        assert (decision.exclude, decision.note) == (None, "")


CAUSES = st.builds(
    Cause,
    node=st.sampled_from(["node1", "node2", "node3"]),
    rank=st.none() | st.integers(0, 7),
    exception=st.sampled_from([None, "builtins.ValueError", "builtins.KeyError"]),
    place=st.sampled_from([None, "train.py:8", "model.py:9"]),
    reached=st.none() | st.integers(0, 3),
    is_global=st.sampled_from([None, True]),
    is_transient=st.sampled_from([None, True]),
    silence=st.sampled_from([None, 4.0]),
    exitcode=st.sampled_from([None, 1, -9, -11]),
    ran=st.sampled_from([None, 1.0, STEADY]),
    permanence=st.sampled_from([None, *(each.value for each in Permanence)]),
    permanent_rank=st.none() | st.integers(0, 7),
    permanent_sign=st.just("sign"),
)


@given(
    CAUSES,
    st.lists(CAUSES, max_size=4, unique_by=lambda cause: (cause.node, cause.permanent_rank)),
    st.data(),
)
def test_the_decision_does_not_depend_on_the_order_of_reports(first, others, data):
    history = FailureHistory(charged=1, last=("builtins.ValueError", "train.py:8", 1, 2), same=2, reached=2)
    shuffled = data.draw(st.permutations(others))
    one, other = (
        decide(PLENTY, history, Evidence((first, *rest), nodes=2, now=5.0, ran=1.0, jitter=0.5))
        for rest in (others, shuffled)
    )
    assert one == other


NAMES = st.sampled_from([f"node{number}" for number in range(6)])
FOUND = st.lists(st.tuples(NAMES, st.just("why")), max_size=6, unique_by=lambda each: each[0])
EVIDENCE = st.builds(
    Evidence,
    causes=st.lists(CAUSES, max_size=3, unique_by=lambda cause: (cause.node, cause.permanent_rank)).map(
        tuple
    ),
    nodes=st.integers(1, 6),
    ran=st.just(1.0),
    unfit=FOUND.map(tuple),
    bound=FOUND.map(tuple),
    available=st.integers(1, 7),
    min_nodes=st.integers(1, 6),
)


@given(st.lists(EVIDENCE, min_size=1, max_size=12), st.integers(0, 4), st.randoms())
def test_exclusions_stay_within_the_limits_in_any_order_of_reports(failures, most, random):
    settings = RestartSettings(1000, max_excluded_nodes=most)
    history, gone = FailureHistory(), 0
    for found in failures:
        decision = decide(settings, history, found)
        first, others = found.causes[:1], list(found.causes[1:])
        mixed = [list(found.unfit), list(found.bound), others]
        for each in mixed:
            random.shuffle(each)
        unfit, bound, others = map(tuple, mixed)
        again = found.replaced(causes=(*first, *others), unfit=unfit, bound=bound)
        assert decide(settings, history, again) == decision
        if decision.stop is not None:
            assert (decision.exclude, decision.note) == (None, "")
            continue
        assert decision.history.excluded - history.excluded == (decision.exclude is not None)
        if decision.exclude is not None:
            gone += 1
            assert decision.exclude in {*dict(found.unfit), *(cause.node for cause in found.causes)}
            assert decision.exclude not in dict(found.bound)
            assert found.available - 1 >= found.min_nodes
        assert gone == decision.history.excluded <= most
        assert len(decision.history.implicated) <= MAX_SUSPECTS
        history = decision.history


@given(st.lists(CAUSES, max_size=30), st.integers(0, 5))
def test_restarts_are_counted_and_never_exceed_the_budget(causes, most):
    found = decisions(RestartSettings(most, max_same_failures=2), causes)
    restarts = [each for each in found if each.stop is None]
    assert len(restarts) <= most
    assert [each.history.charged for each in restarts] == list(range(1, len(restarts) + 1))


@given(st.integers(1, 5), st.floats(1, 100), st.lists(st.floats(0, 60), max_size=60))
def test_no_window_contains_more_restarts_than_allowed(most, window, gaps):
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


@given(st.lists(CAUSES, min_size=1, max_size=10))
def test_a_job_whose_steps_or_attempts_show_progress_is_never_permanent(causes):
    causes = [cause.replaced(permanence=None) for cause in causes]
    steady = [cause.replaced(is_global=None, ran=STEADY) for cause in causes]
    assert stops(decisions(PLENTY, steady))[1] is None
    rising = [
        cause.replaced(reached=step, is_global=True, ran=1.0) for step, cause in enumerate(causes, start=1)
    ]
    assert stops(decisions(PLENTY, rising))[1] is None


@given(CAUSES, st.integers(1, 4))
def test_a_failure_that_repeats_itself_ends_the_job_or_never_counts(cause, most):
    same = cause.replaced(permanence=None, ran=1.0)
    restarts, stop = stops(decisions(PLENTY.replaced(max_same_failures=most), [same] * 30))
    assert (restarts, stop) in {
        (30, None),
        (most - 1, Verdict.PERMANENT),
        (most * UNPROVEN - 1, Verdict.PERMANENT),
    }


@given(st.integers(1, 4), st.lists(CAUSES, max_size=5))
def test_no_start_error_is_permanent_after_another_failure(nodes, causes):
    history = decide(PLENTY, FailureHistory(), Evidence((Cause(exitcode=1),), nodes=nodes)).history
    starts = [cause.replaced(permanence=Permanence.START_ERROR.value) for cause in causes]
    for start in starts:
        decision = decide(PLENTY, history, Evidence((start,), nodes=nodes, ran=1.0))
        assert decision.stop is None
        history = decision.history
