"""The step from which the next attempt goes on: every rank has a copy, and it is always the newest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.inside.keep.choice import (
    NEAR,
    Choice,
    Holding,
    KeptSlot,
    Loop,
    choose,
    failed_soon,
    last_step,
    refused_of,
)
from elasticrs._engine.inside.keep.layout import Answer, Mode, Why

MOST = 6
"""Highest step in the generated holdings."""


def replicated(steps, small=(), **more):
    slots = tuple(KeptSlot(index, step, why_copied=Why.AT_DEATH) for index, step in enumerate(steps))
    return Holding(slots, frozenset(small), mode=Mode.REPLICATED, **more)


def sharded(steps, small=(), **more):
    return replicated(steps, small, **more).replaced(mode=Mode.SHARDED)


steps = st.integers(0, MOST)
slots = st.lists(
    st.builds(KeptSlot, st.just(0), steps, st.integers(0, 1), st.integers(0, 1), st.integers(0, 1)),
    max_size=2,
).map(lambda found: tuple(slot.replaced(index=index) for index, slot in enumerate(found)))
holding = st.builds(
    Holding,
    slots,
    st.frozensets(steps, max_size=3),
    has_joined=st.booleans(),
    attempt=st.integers(0, 1),
    ended=st.none() | steps,
    mode=st.integers(0, 2),
    check=st.none() | st.tuples(st.integers(0, 1), st.integers(0, 1)),
    restored=st.none() | steps,
    answer=st.integers(0, 9),
)
holdings = st.lists(holding, min_size=1, max_size=4).map(lambda found: dict(enumerate(found)))


def test_lost_steps_are_counted_from_where_the_training_was():
    """An attempt may end before a rank has restored a step, or before one has ended another step."""
    failed = {rank: replicated([27], attempt=2, restored=restored) for rank, restored in ((0, None), (1, 29))}
    stale = {2: replicated([], attempt=1, restored=27, ended=40)}
    assert choose({**failed, **stale}, 3).lost == 2
    none = {rank: replicated([27], attempt=3) for rank in (0, 1)}
    assert choose(none, 2, before=last_step(failed.values())).lost == 2
    assert choose(none, 2, before=last_step({}.values(), (2, 27))).lost == 0
    assert last_step(failed.values(), (1, 99)) == (2, 29)
    assert choose({0: none[0]}, 1, before=(1, 9), barred_from=0).shown()["lost"] is None


def is_abandoned(slot, found):
    """True if some rank has gone on in a later attempt from an earlier step than this copy's."""
    went_on = [each for each in found.values() if each.has_joined and each.ended is not None]
    last = max((each.attempt for each in went_on), default=0)
    return slot.attempt < last and any(each.restored is None or each.restored < slot.step for each in went_on)


def copies_of(found, step):
    return {
        rank: slots
        for rank, each in found.items()
        if (slots := [slot for slot in each.slots if slot.step == step and not is_abandoned(slot, found)])
    }


def can_continue(found, world, step, is_replicated):
    """True if every rank has a source for its large state of a step; ``None`` if copies differ."""
    copies = copies_of(found, step)
    if is_replicated and copies:
        if len({(slot.layout, slot.digest) for slots in copies.values() for slot in slots}) > 1:
            return None
        return True
    return world == len(found) and copies.keys() == set(range(world))


@given(holdings, st.integers(1, 5), st.none() | steps, st.booleans())
def test_each_rank_has_a_source_and_no_newer_step_would_do(found, world, barred_from, was_replicated):
    chosen = choose(found, world, barred_from=barred_from, was_replicated=was_replicated)
    allowed = [step for step in range(MOST + 1) if barred_from is None or step < barred_from]

    def is_exact(step):
        return all(
            rank in found and (step in found[rank].small or rank in copies_of(found, step))
            for rank in range(world)
        )

    possible = {step: can_continue(found, world, step, chosen.is_replicated) for step in allowed}
    if chosen.step is None:
        assert True not in possible.values()
        assert not chosen.sources
        return
    assert possible[chosen.step] is not False
    assert chosen.is_exact == is_exact(chosen.step)
    better = [step for step in allowed if possible[step] and (step > chosen.step or not chosen.is_exact)]
    assert not [step for step in better if is_exact(step)]
    assert chosen.is_exact or not [step for step in better if step > chosen.step]
    assert chosen.sources.keys() == set(range(world))
    older = [step for step in range(chosen.step) if copies_of(found, step).keys() >= set(range(world))]
    assert chosen.fallback == max(older, default=None)
    for rank, (holder, index, _) in chosen.sources.items():
        slot = found[holder].slots[index]
        assert slot.step == chosen.step
        assert not is_abandoned(slot, found)
        assert holder == rank or (chosen.is_replicated and rank not in chosen.kept_by)
    assert len({found[holder].slots[index].layout for holder, index, _ in chosen.sources.values()}) == 1 or (
        not chosen.is_replicated
    )


@given(holdings, st.integers(1, 5), st.none() | steps, st.booleans())
def test_a_choice_says_why_steps_are_lost(found, world, barred_from, was_replicated):
    chosen = choose(found, world, barred_from=barred_from, was_replicated=was_replicated)
    is_used = any(each.has_joined or each.slots for each in found.values())
    if chosen.step is None or chosen.lost:
        assert bool(chosen.why) == is_used


def test_nothing_is_known_about_ranks_that_have_kept_nothing():
    assert not choose({}, 2).is_replicated
    assert choose({}, 2, was_replicated=True).is_replicated


def test_survivors_of_a_replicated_job_hand_their_copy_on():
    found = {
        0: replicated([10, 12], ended=12),
        1: replicated([10], [11, 12], ended=11),
        2: replicated([10, 12], ended=12),
    }
    chosen = choose(found, 3)
    assert (chosen.step, chosen.sources) == (12, {0: (0, 1, 0), 1: (2, 1, 0), 2: (2, 1, 0)})
    assert (chosen.lost, chosen.is_exact, chosen.why) == (0, True, "")
    assert (
        chosen.line()
        == "keep: the job can continue at step 12, copied at the failure by 2 of 3 ranks, 0 steps lost"
    )


def test_without_a_small_state_of_the_newest_step_an_older_exact_step_is_chosen():
    found = {0: replicated([10, 12], ended=12), 1: replicated([10], [11], ended=11)}
    chosen = choose(found, 2)
    assert (chosen.step, chosen.lost, chosen.is_exact) == (10, 2, True)
    assert "rank 1 had no random numbers of step 12" in chosen.line()
    only = choose({0: replicated([12], ended=12), 1: replicated([], [11], ended=11)}, 2)
    assert (only.step, only.behind, only.is_exact) == (12, (1,), False)
    assert "rank 1 draws new random numbers" in only.line()


def test_sharded_state_needs_the_copy_of_each_rank():
    found = {0: sharded([10, 12], ended=12), 1: sharded([10], [12], ended=12)}
    assert (choose(found, 2).step, choose(found, 2).why) == (10, "rank 1 had no copy of step 12")
    other = choose(found, 3)
    assert other.step is None
    assert "2 ranks kept step 12, now there are 3" in other.why


def test_equal_checks_show_that_the_state_is_replicated():
    def pair(one, other):
        return {
            0: replicated([12], ended=12, check=one).replaced(mode=Mode.AUTO),
            1: replicated([], [12], ended=12, check=other).replaced(mode=Mode.AUTO),
        }

    assert choose(pair((2, 7), (2, 7)), 2).step == 12
    assert choose(pair((2, 7), (2, 8)), 2, was_replicated=True).step is None
    assert choose(pair((2, 7), None), 2).step is None
    assert choose(pair((2, 7), None), 2, was_replicated=True).step == 12


def test_copies_that_differ_are_not_shared():
    found = {rank: Holding((KeptSlot(0, 12, digest=rank),), ended=12, check=(2, 7)) for rank in range(2)} | {
        2: Holding(small=frozenset((12,)), ended=12, check=(2, 7))
    }
    assert choose(found, 3).step is None
    assert choose({rank: found[rank] for rank in range(2)}, 2).sources == {0: (0, 0, 0), 1: (1, 0, 0)}


def test_ranks_that_exchange_their_states_now_and_then_have_no_replicated_state():
    found = {
        0: Holding((KeptSlot(0, 5, digest=1), KeptSlot(1, 7, digest=3)), ended=7, check=(2, 7)),
        1: Holding((KeptSlot(0, 5, digest=2),), frozenset((7,)), ended=6, check=(2, 7)),
    }
    chosen = choose(found, 2, was_replicated=True)
    assert (chosen.step, chosen.sources) == (5, {0: (0, 0, 0), 1: (1, 0, 0)})


def test_a_new_rank_of_a_replicated_job_is_behind():
    chosen = choose({0: replicated([5], ended=5)}, 2)
    assert (chosen.step, chosen.sources, chosen.behind) == (5, {0: (0, 0, 0), 1: (0, 0, 0)}, (1,))


def test_steps_of_an_abandoned_attempt_are_not_chosen():
    slots = KeptSlot(0, 30, attempt=0), KeptSlot(1, 25, attempt=1)
    found = {rank: Holding(slots, mode=Mode.SHARDED, attempt=1, ended=27, restored=20) for rank in range(2)}
    assert choose(found, 2).step == 25
    assert choose({rank: each.replaced(restored=30) for rank, each in found.items()}, 2).step == 30
    assert choose({rank: each.replaced(restored=None) for rank, each in found.items()}, 2).step == 25
    # No rank ended a step after the start from step 30.
    assert (
        choose({rank: each.replaced(ended=None, restored=None) for rank, each in found.items()}, 2).step == 30
    )


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Answer.NO_MEMORY, "memory was short"),
        (Answer.CHANGING, "changing"),
        (Answer.NONE, "step 9 was not copied"),
    ],
)
def test_why_the_last_step_is_not_kept(answer, text):
    chosen = choose({0: replicated([8], ended=9, answer=answer)}, 1)
    assert (chosen.step, chosen.lost) == (8, 1)
    assert text in chosen.line()


def test_nothing_is_missing_without_keep():
    assert choose({0: Holding(has_joined=False)}, 1) == Choice(ranks=1)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ([{"ended": 3}, {}], "step 3 was not copied"),
        ([{}, {}], "the failure came before the end of the first step"),
        ([{"changes": 1}, {"has_joined": False}], "the failure came before the end of the first step"),
        ([{"changes": 2}, {}], "the script had not called keep.step, although its optimizer had run"),
        ([{"off": "no memory"}, {"off": "no memory"}], "Keep was off: no memory (ranks 0, 1)"),
        ([{"off": "no memory"}, {"off": "lazy"}], "Keep was off: no memory (rank 0); lazy (rank 1)"),
        (
            [{"off": "no memory", "ended": 4}, {"answer": Answer.CHANGING, "ended": 4}],
            "step 4 was not copied: no memory (rank 0); the optimizer was changing the state (rank 1)",
        ),
    ],
)
def test_why_nothing_is_kept(found, why):
    chosen = choose({rank: Holding(**each) for rank, each in enumerate(found)}, len(found))
    assert chosen.step is None
    assert chosen.why.startswith(why)


CAUSE, OTHER = ("builtins.ValueError", "train.py:8"), ("builtins.OSError", "train.py:9")


def test_a_restored_state_that_fails_twice_alike_is_set_aside_until_it_is_passed():
    loop = Loop().after(100, 103, CAUSE).after(103, 103 + NEAR - 1, CAUSE)
    assert loop.barred_from == 100
    found = {0: replicated([90, 103], ended=103)}
    chosen = choose(found, 1, barred_from=loop.barred_from)
    assert chosen.step == 90
    assert "steps from 100 on are set aside" in chosen.line()
    assert loop.after(90, 100 + NEAR - 1, CAUSE).barred_from == 100
    assert loop.after(90, 100 + NEAR, CAUSE).barred_from is None


@pytest.mark.parametrize(
    "second",
    [(100, 100 + NEAR, CAUSE), (100, 101, OTHER), (100, 101, None), (None, 101, CAUSE)],
    ids=["progress", "another cause", "unknown cause", "from no kept step"],
)
def test_a_restored_state_is_not_set_aside_otherwise(second):
    assert Loop().after(100, 101, CAUSE).after(*second).barred_from is None


def test_after_a_step_that_a_rank_cannot_load_an_older_one_is_tried_and_then_none():
    loop = Loop().after(None, None, CAUSE, refused=12)
    assert (loop.barred_from, loop.refused) == (None, 12)
    found = {0: replicated([10, 12], ended=12)}
    older = choose(found, 1, refused=loop.refused)
    assert (older.step, older.why) == (10, "a rank could not load step 12")
    told = {0: found[0].replaced(refused=12, off="no net.1")}
    assert choose(told, 1, refused=12).why == "the kept state could not be loaded: no net.1 (rank 0)"
    # Without an older copy, the same step is tried again.
    assert choose({0: replicated([12], ended=12)}, 1, refused=12).step == 12
    assert loop.after(12, 13, CAUSE).refused is None
    again = loop.after(None, None, CAUSE, refused=10)
    none = choose(found, 1, barred_from=again.barred_from, refused=again.refused)
    assert (none.step, none.why) == (None, "the kept state could not be loaded in two attempts")
    assert again.after(None, NEAR, None).barred_from is None


def test_a_rank_that_trains_on_without_the_kept_state_has_not_ended_the_attempt():
    refusing = Holding(ended=None, refused=12)
    assert refused_of([Holding(restored=12), refusing]) == 12
    assert refused_of([Holding(restored=12), refusing.replaced(ended=1)]) is None
    assert refused_of([Holding(restored=12)]) is None


@given(
    st.lists(
        st.tuples(
            st.none() | st.integers(0, 99),
            st.none() | st.integers(0, 99),
            st.sampled_from([CAUSE, OTHER, None]),
        )
    )
)
def test_a_bar_needs_two_attempts_that_failed_soon(attempts):
    loop, soon = Loop(), []
    for began, reached, cause in attempts:
        before, loop = loop, loop.after(began, reached, cause)
        is_soon = began is not None and cause is not None and (reached is None or reached < began + NEAR)
        soon = [*soon, (began, cause)] if is_soon else []
        if loop.barred_from is not None and loop.barred_from != before.barred_from:
            (first, one), (second, other) = soon[-2:]
            assert one == other
            assert loop.barred_from <= min(first, second)


def test_an_attempt_began_from_a_step_only_if_a_rank_restored_it():
    assert failed_soon([Holding(ended=12, restored=10), Holding(has_joined=False)], 10) == (10, 12)
    assert failed_soon([Holding(ended=12, restored=None)], 10) == (None, 12)
    assert failed_soon([Holding(has_joined=False)], 10) == (None, None)


TWINS = ((0, 2, 2), (1, 2, 2))
"""The ranks 0 and 2, and the ranks 1 and 3, have the same parts of the state."""


@pytest.mark.parametrize(
    ("kept", "chosen"),
    [
        ({0: (10, 17), 1: (10, 17)}, 17),  # A node is lost.
        ({0: (10, 17), 1: (10, 18)}, 10),
        ({0: (10, 17), 1: (10,), 2: (10, 17), 3: (10, 17)}, 17),
        ({0: (10, 17), 2: (10, 17)}, None),
    ],
)
def test_a_replica_of_a_part_serves_a_rank_without_a_copy(kept, chosen):
    found = {rank: sharded(steps, (17,), twins=TWINS[rank % 2]) for rank, steps in kept.items()}
    choice = choose(found, 4)
    assert choice.step == chosen
    for rank, (holder, index, _) in choice.sources.items():
        assert holder % 2 == rank % 2
        assert found[holder].slots[index].step == chosen


def test_copies_that_differ_serve_no_other_rank():
    found = {
        rank: Holding((KeptSlot(0, 17, digest=rank),), mode=Mode.SHARDED, twins=(0, 1, 3)) for rank in (0, 1)
    }
    assert choose(found, 3).step is None
    same = {rank: each.replaced(slots=(KeptSlot(0, 17),)) for rank, each in found.items()}
    assert choose(same, 3).step == 17


@given(first=steps, stride=steps, count=steps, rank=steps)
def test_ranks_with_the_same_part(first, stride, count, rank):
    found = Holding(twins=(first, stride, count))
    expected = stride > 0 and rank in range(first, first + stride * count, stride)
    assert found.has_same_part(rank) is expected
    assert Holding.of_json(found.to_json()) == found
