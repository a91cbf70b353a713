"""Random schedules of the shipped step functions. See ``docs/design/rendezvous.md`` for the invariants that
are checked.

A failure names its seed: ``python -m tests.rendezvous.soak --schedules 1 --seed SEED`` plays it again.
"""

import os
from collections import Counter

import hypothesis
import pytest
from hypothesis import strategies as st

from rendezvous import schedules, soak
from rendezvous.rules_off import RULES, UNFIT, rule_off

IS_THOROUGH = os.environ.get("ELASTICRS_HYPOTHESIS_PROFILE") == "thorough"
RULE_LIMIT = 40_000
PARTS = 4
PER_PART = RULE_LIMIT // PARTS if IS_THOROUGH else 100
"""As many in all as it takes to see that any rule is off: `make soak` plays more."""
RARELY_SEEN = {
    "a_spare_that_is_lost_makes_the_job_too_small": 2_100,
    "a_slot_counts_before_it_is_known": 2_300,
    "an_end_that_is_not_told_stops_nobody": 64_800,
    "any_absence_explains": 1_100,
    "exclusions_are_not_counted": 800,
    "free_by_the_last_table": 11_100,
    "refused_by_itself": 4_200,
    "registration_deletes_by_agent": 7_300,
    "slot_without_form": 2_300,
}
"""Where the search begins for a rule whose absence thousands of schedules do not show: it would take minutes.
When another code plays the same seeds otherwise, this beginning is as good as any."""

HAPPENS = (
    "CLOSED aborted",
    "CLOSED failed",
    "CLOSED succeeded",
    "CLOSED timeout",
    "ENDED failure",
    "ENDED left",
    "ENDED lost",
    "ENDED scale",
    "ENDED setup",
    "exit_lost",
    "exit_spare",
    "exit_stuck",
    "given_up",
    "gone",
    "resumed",
    "server_died",
    "server_returned",
)

choices = st.lists(st.integers(0, (1 << 16) - 1), max_size=400)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_random_schedule_breaks_an_invariant(part):
    totals = soak.play(range(part * 1_000_000, part * 1_000_000 + PER_PART))
    assert totals["rounds"] > PER_PART / 2
    if IS_THOROUGH:
        assert not [what for what in HAPPENS if not totals[what]], "the schedules miss what they are for"


@pytest.mark.parametrize(("how", "end"), [({"asks": True}, "asked"), ({"delay": 5.0}, "failure")])
def test_no_schedule_with_requested_or_delayed_rounds_breaks_an_invariant(how, end):
    totals = Counter()
    for seed in range(PER_PART):
        totals.update(schedules.play(seed, **how).stats)
    assert totals[f"ENDED {end}"] > PER_PART / 10


def test_no_schedule_with_unfit_nodes_breaks_an_invariant():
    totals = Counter()
    for seed in range(PER_PART):
        totals.update(schedules.play(seed, delay=5.0 * (seed % 2), unfit=0.4).stats)
    assert totals["excluded"] >= totals["exit_excluded"] > PER_PART / 100


def test_the_outcome_does_not_depend_on_the_clocks():
    """Clocks affect only the times that are reported, and which failure is considered the first."""

    def what_happened(world):
        # The last item of a line is a name, an event or an action. Events and actions contain times, so
        # compare only their types.
        return [(*line[:-1], line[-1] if isinstance(line[-1], str) else type(line[-1])) for line in world.log]

    for seed in range(max(100, PER_PART // 10)):
        told = [schedules.play(seed, clocks_agree=agree) for agree in (True, False)]
        assert what_happened(told[0]) == what_happened(told[1])


@pytest.mark.timeout(900)
@hypothesis.given(choices)
def test_no_schedule_generated_by_hypothesis_breaks_an_invariant(numbers):
    schedules.play_choices(numbers)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RULES)
def test_the_checker_detects_that_a_rule_is_disabled(name):
    with rule_off(name):
        first, how = RARELY_SEEN.get(name, 0), {"unfit": 0.4} if name in UNFIT else {}
        for seed in range(first, first + RULE_LIMIT):
            try:
                schedules.play(seed, **how)
            except schedules.ScheduleError:
                return
    pytest.fail(f"{name}: not seen in {RULE_LIMIT} schedules")
