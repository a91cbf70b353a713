"""The shipped step functions under random schedules; see ``docs/design/rendezvous.md`` for what is checked.

A failure names its seed: ``python -m tests.rendezvous.soak --seconds 0.1 --seed SEED`` plays it again.
"""

import contextlib
import os
from unittest import mock

import hypothesis
import pytest
from hypothesis import strategies as st

from rendezvous import schedules
from rendezvous.checks import ViolationError
from rendezvous.rules_off import RULES

IS_THOROUGH = os.environ.get("ELASTICRS_HYPOTHESIS_PROFILE") == "thorough"
PARTS, PER_PART = 10, 10_000 if IS_THOROUGH else 100
RULE_LIMIT = 40_000

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
    "server_died",
)

choices = st.lists(st.integers(0, (1 << 16) - 1), max_size=400)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_breaks_a_rule(part):
    totals = schedules.play_many(part * 1_000_000, PER_PART)
    assert totals["rounds"] > PER_PART / 2
    if IS_THOROUGH:
        assert not [what for what in HAPPENS if not totals.get(what)], "the schedules miss what they are for"


@pytest.mark.timeout(300)
@hypothesis.given(choices)
def test_no_schedule_of_choices_breaks_a_rule(numbers):
    schedules.play_choices(numbers)


@contextlib.contextmanager
def rule_off(name):
    owners, attribute, replacement = RULES[name]
    with contextlib.ExitStack() as stack:
        for owner in owners:
            stack.enter_context(mock.patch.object(owner, attribute, replacement))
        yield


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RULES)
def test_the_checker_sees_that_a_rule_is_off(name):
    with rule_off(name):
        for seed in range(RULE_LIMIT):
            try:
                schedules.play(seed)
            except schedules.ScheduleError:
                return
    pytest.fail(f"{name}: not seen in {RULE_LIMIT} schedules")


def breaks_a_rule(numbers):
    try:
        schedules.play_choices(numbers)
    except ViolationError:
        return True
    return False


def test_a_failing_schedule_shrinks():
    settings = hypothesis.settings(max_examples=500, database=None, deadline=None, derandomize=True)
    with rule_off("the_listener_is_kept"):
        smallest = hypothesis.find(choices, breaks_a_rule, settings=settings)
        assert breaks_a_rule(smallest)
    assert not breaks_a_rule(smallest)
    assert len(smallest) < 100
