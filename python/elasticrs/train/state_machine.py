"""Decide what the training loop does next. All functions are pure: no I/O, no clock, no random numbers.

:func:`step` takes a state and an event, and returns the next state and a sequence of actions.

Invariants, each checked by a property test:

- **TRAIN-1** after every failure, the snapshot from before the failed step or rendezvous is applied before
  the workers start a new round. A ``sync`` that has returned is not undone: the received state is kept.
- **TRAIN-2** after a failure or a rendezvous, no step starts before a ``sync`` of all workers. So no
  committed step of any worker is lost, because the most advanced state wins.
- **TRAIN-3** the loop gives up after ``max_failures`` failures of this worker without a committed step in
  between, and not earlier. An aborted collective is usually caused by another worker, which counts its
  failure itself. So :data:`OF_OTHERS` times as many aborted collectives are allowed. This worker is then
  still running when the failing worker gives up.
- **TRAIN-4** once a worker knows that the data has run out, it takes no further step. It returns only after
  one more rendezvous with a ``sync``, so that all workers return the same state. Programs for torchelastic
  0.1 skip that ``sync`` if all workers are at the same step
  (:func:`elasticrs.train.votes.have_ended_together`).
- **TRAIN-5** a worker that was asked to leave does so only after a step that all workers have completed, so
  no step is rolled back because of it.
"""

from __future__ import annotations

from enum import Enum

from elasticrs._engine.job.value import Value

OF_OTHERS = 100
"""Limit for aborted collectives, as a multiple of the limit for failures."""


class Event(Enum):
    """Event that a worker reports to its state machine."""

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
    """Action that this worker executes."""

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
    """State of the training loop. Every decision depends only on this state and the event.

    Args:
        max_failures: number of failures without progress after which the loop gives up.
        failures: number of failures of this worker since the last committed step.
        broken_off: number of aborted collectives since the last committed step.
        at_the_end: true if any worker has run out of data.
    """

    max_failures: int
    failures: int = 0
    broken_off: int = 0
    at_the_end: bool = False


# Look up these enum members only once, because attribute access on an enum takes longer than the rest of an
# idle iteration.
STEPPED = Event.STEPPED
ONE_STEP = (Action.STEP,)
_MEET = (Action.MEET,)
_SYNC = (Action.SYNC,)


def step(loop: Loop, event: Event) -> tuple[Loop, tuple[Action, ...]]:
    """Return the state that follows an event, and the actions to execute in order."""
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
