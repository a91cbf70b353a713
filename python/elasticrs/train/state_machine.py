"""What the loop does next, as a pure function: no I/O, no clock, no randomness.

:func:`step` takes a state and an event, and returns the next state and the actions to carry out in order.

Invariants, each held by a property test:

- **TRAIN-1** after every failure the snapshot of this turn is applied before the workers meet again. A
  ``sync`` that has returned is a turn of its own: what came by it stays.
- **TRAIN-2** no step follows a failure, or a meeting, before a ``sync`` of all workers: so what one has
  committed is never lost to the others (the state that has come furthest wins).
- **TRAIN-3** the loop gives up after ``max_failures`` failures of its own without a committed step between
  them, and not before. A collective that is broken off is mostly another worker's failure, which that one
  counts: it takes :data:`OF_OTHERS` times as many, so that the others are still there when it gives up.
- **TRAIN-4** once a worker knows that the data have ended it takes no further step, and it returns only after
  one more meeting with a ``sync``, so that all return the same state. Programs for torchelastic 0.1 skip that
  ``sync`` if all are at the same step (:func:`elasticrs.train.votes.have_ended_together`).
- **TRAIN-5** who was asked to leave does so only after a step that is done by all: nothing is rolled back for
  it.
"""

from __future__ import annotations

from enum import Enum

from elasticrs.job.value import Value

OF_OTHERS = 100
"""How many collectives that were broken off count as one failure."""


class Event(Enum):
    """What has happened to this worker."""

    BEGIN = "begin"
    MET = "met"
    MET_AT_THE_END = "met, and some worker's data have ended"
    SYNCED = "synced"
    STEPPED = "stepped"
    CHANGED = "stepped, and the workers shall meet anew"
    LEAVES = "stepped, and this worker shall leave the job"
    OUT_OF_DATA = "out of data"
    FAILED = "failed, and may try again"
    BROKEN_OFF = "failed in a collective, and may try again"
    BROKE = "failed for good"
    ENDED = "the job has ended, and nothing has been begun"
    CUT = "the job has ended in the middle of a turn"


class Action(Enum):
    """What this worker does."""

    MEET = "meet"
    SYNC = "sync"
    STEP = "step"
    ROLL_BACK = "roll back"
    CLOSE = "close"
    LEAVE = "leave"
    RETURN = "return"
    GIVE_UP = "give up"
    RAISE = "raise"


class Loop(Value):
    """Everything that decisions depend on.

    Args:
        max_failures: how many failures without progress are too many.
        failures: of this worker, since the last committed step.
        broken_off: collectives, since then.
        at_the_end: some worker's data have ended.
    """

    max_failures: int
    failures: int = 0
    broken_off: int = 0
    at_the_end: bool = False


# A look at a member of an enumeration costs more than the rest of a turn without news.
STEPPED = Event.STEPPED
ONE_STEP = (Action.STEP,)
_MEET = (Action.MEET,)
_SYNC = (Action.SYNC,)


def step(loop: Loop, event: Event) -> tuple[Loop, tuple[Action, ...]]:
    """Return the state after an event, and what to do."""
    if event is STEPPED:
        return _with_progress(loop), ONE_STEP
    if event is Event.BEGIN:
        return loop, _MEET
    if event is Event.MET:
        return loop, _SYNC
    if event is Event.MET_AT_THE_END:
        return loop.replaced(at_the_end=True), _SYNC
    if event is Event.SYNCED:
        return loop, (Action.CLOSE, Action.RETURN) if loop.at_the_end else ONE_STEP
    if event is Event.CHANGED:
        return _with_progress(loop), _MEET
    if event is Event.LEAVES:
        return loop, (Action.LEAVE, Action.RETURN)
    if event is Event.OUT_OF_DATA:
        return loop.replaced(at_the_end=True), _MEET
    if event is Event.FAILED:
        return _after_failure(loop.replaced(failures=loop.failures + 1))
    if event is Event.BROKEN_OFF:
        return _after_failure(loop.replaced(broken_off=loop.broken_off + 1))
    if event is Event.BROKE:
        return loop, (Action.RAISE,)
    return loop, (Action.RETURN,) if event is Event.ENDED else (Action.ROLL_BACK, Action.RETURN)


def _with_progress(loop: Loop) -> Loop:
    return loop.replaced(failures=0, broken_off=0) if loop.failures or loop.broken_off else loop


def _after_failure(loop: Loop) -> tuple[Loop, tuple[Action, ...]]:
    is_last = loop.failures >= loop.max_failures or loop.broken_off >= loop.max_failures * OF_OTHERS
    return loop, (Action.ROLL_BACK, Action.GIVE_UP if is_last else Action.MEET)
