"""Tests for the time limits of hooks, with a simulated clock."""

from contextlib import ExitStack
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs.agent.server.simple_elastic_agent import Progress


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_an_agent_outside_hooks_is_never_overdue(clock):
    progress = Progress(clock)
    clock.now += 1e6
    progress.tell()
    progress.renew()
    assert progress.overdue() == (0, None)


def test_a_limit_set_by_a_hook_replaces_its_default_limit(clock):
    progress = Progress(clock)
    with progress.within("_start_workers", 600):
        progress.tell(300)
        clock.now += 301
        assert progress.overdue() == (1, "_start_workers")
        progress.tell()
        assert progress.overdue() == (0, "_start_workers")
        clock.now += 2
        assert progress.overdue() == (2, "_start_workers")
        progress.renew()
        clock.now += 600
        assert progress.overdue() == (0, "_start_workers")


def test_leaving_a_hook_also_leaves_an_inner_hook_interrupted_by_a_signal(clock):
    progress = Progress(clock)
    with progress.within("_stop_workers", 30):
        # `__exit__` is never called, because the signal handler raised before the body of the `with`
        # statement began.
        progress.within("_pause", 0).__enter__()
    assert progress.overdue() == (0, None)


STEPS = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from([0.0, 5.0, 60.0, inf])),
    st.tuples(st.just("leave"), st.just(0.0)),
    st.tuples(st.just("wait"), st.floats(0, 100)),
    st.tuples(st.just("tell"), st.sampled_from([0.0, 7.0, 300.0])),
)


@given(st.lists(STEPS, max_size=40))
def test_overdue_time_counts_from_the_last_progress_of_the_innermost_hook(steps):
    clock = Clock()
    progress = Progress(clock)
    # Allowances of the active hooks, outermost first, and the deadline of the innermost hook.
    allowed, until, places = [], inf, []
    with ExitStack() as left_over:
        for what, number in steps:
            if what == "enter":
                place = progress.within(f"hook{len(places)}", number)
                place.__enter__()
                places.append(place)
                allowed.append(number)
                until = clock.now + number
            elif what == "leave" and places:
                places.pop().__exit__(None, None, None)
                allowed.pop()
                until = clock.now + allowed[-1] if allowed else inf
            elif what == "wait":
                clock.now += number
            elif what == "tell" and places:
                progress.tell(number)
                until = clock.now + number
            overdue, name = progress.overdue()
            assert overdue == max(0, clock.now - until)
            assert name == (f"hook{len(places) - 1}" if places else None)
        for place in places:
            left_over.push(place)
    assert progress.overdue() == (0, None)
