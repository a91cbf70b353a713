"""Decide what the training loop does next, and when workers leave a round. All functions are pure.

Invariants, each checked by a property test:

- **TRAIN-1** after every failure, the snapshot from before the failed step or rendezvous is applied before
  the workers start a new round. A ``sync`` that has returned is not undone.
- **TRAIN-2** after a failure or a rendezvous, no step starts before a ``sync``, in which all workers take
  over the most advanced state. So no committed step is lost.
- **TRAIN-3** the loop gives up after exactly ``max_failures`` failures of this worker without a committed
  step in between. An aborted collective is usually the consequence of another worker's failure. Therefore,
  :data:`OF_OTHERS` times as many aborted collectives are allowed, so that this worker outlives the failing
  one.
- **TRAIN-4** once a worker knows that the data has run out, it takes no further step. It returns only after
  one more rendezvous with a ``sync``, so that all workers return the same state. Programs for torchelastic
  0.1 skip that ``sync`` if all workers are at the same step (:func:`have_ended_together`).
- **TRAIN-5** a worker that was asked to leave does so only after a step that all workers have completed.

If the members change without a failure, all workers leave the round after the same step
(:class:`LeaveStep`). Each worker counts its step boundaries, and publishes a cap: the boundary two steps
ahead, which it does not pass before the leave step is known. All workers leave at the largest cap.

- **LEAVE-1** no worker passes its own cap before the leave step is known, so no worker is ever past that
  step.
- **LEAVE-2** a single worker publishes the leave step together with the decision about saving a checkpoint
  there, as one value. So either all workers save, or none.
- **LEAVE-3** the watching threads publish the caps, even while their workers wait at a cap.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from elasticrs._engine.job.value import Record, Value

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal, TypeAlias

    Decision: TypeAlias = Literal["go", "wait", "leave"]

OF_OTHERS = 100
"""Limit for aborted collectives, as a multiple of the limit for failures."""


class Event(Enum):
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


# Attribute access on an enum takes longer than the rest of an idle iteration.
STEPPED = Event.STEPPED
ONE_STEP = (Action.STEP,)
_MEET = (Action.MEET,)
_SYNC = (Action.SYNC,)


def transition(loop: Loop, event: Event) -> tuple[Loop, tuple[Action, ...]]:
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


class Vote(Record):
    """Integers that a worker sends to all others at the start of a round, to find a :func:`disagreement`.

    Args:
        has_manager: true if the worker has a checkpoint manager.
        is_loaded: true if the worker's state belongs to this run of the job, so it loads no checkpoint.
        at_the_end: true if the worker knows that a worker has run out of data.
        next_round: random number. The number of rank 0 becomes the name of the new round.
        last_round: name of the worker's last round; 0 if it has been in no round.
        asked: number of calls of ``should_save_checkpoint`` in the last round.
        said_yes: number of the last of these calls that returned true, counted from 1; 0 if none did.
        is_saving: true if that call was followed by a save that the worker has not completed.
        next_step: number of the next step in the last round, counted from 1; 0 if not synchronized, or in a
            program that was not written for torchelastic 0.1.
    """

    has_manager: int = 0
    is_loaded: int = 0
    at_the_end: int = 0
    next_round: int = 0
    last_round: int = 0
    asked: int = 0
    said_yes: int = 0
    is_saving: int = 0
    next_step: int = 0


def have_ended_together(votes: Sequence[Vote]) -> bool:
    """Return true if all workers are at the same step, and one has run out of data. Always false in a program
    that was not written for torchelastic 0.1.
    """
    first = votes[0]
    return (
        first.next_step > 0
        and any(vote.at_the_end for vote in votes)
        and all((vote.last_round, vote.next_step) == (first.last_round, first.next_step) for vote in votes)
    )


def disagreement(votes: Sequence[Vote]) -> str | None:
    """Return a message if the workers disagree about the checkpoint manager or about when to save."""
    if len({vote.has_manager for vote in votes}) > 1:
        with_one = [rank for rank, vote in enumerate(votes) if vote.has_manager]
        without = [rank for rank, vote in enumerate(votes) if not vote.has_manager]
        return f"set_checkpoint_manager was called on {_ranks(with_one)}, but not on {_ranks(without)}"
    for first in votes:
        if not first.is_saving:
            continue
        peers = [vote for vote in votes if vote.last_round == first.last_round]
        # A worker whose last save is later must have taken part in the save that `first` has not completed.
        against = [vote for vote in peers if vote.asked >= first.said_yes > vote.said_yes]
        if against:
            return (
                f"should_save_checkpoint differs: False on {len(against)} of {len(peers)} workers, "
                f"True on others, after step {first.said_yes} of the last round"
            )
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


AHEAD = 2
"""Number of step boundaries from a worker's current one to its cap. With 1, workers would often wait."""

AT_ONCE = 0
"""Leave step of a broken round: workers leave such a round immediately."""


class LeaveStep(Record):
    """Progress of one worker within a round, and the step after which it leaves the round (the leave step).
    Hold a lock while using this object.

    Args:
        done: number of steps that the worker has completed.
        cap: number of steps after which the worker waits until ``at`` is known; ``None`` if no change of the
            workers is due.
        at: number of steps after which all workers leave the round; ``None`` if it is not known.
        saves: true if all workers save a checkpoint at the leave step.
    """

    done: int = 0
    cap: int | None = None
    at: int | None = None
    saves: bool = False

    def decision(self) -> Decision:
        """Return the action at the current step boundary: ``go`` (continue), ``wait`` or ``leave``."""
        if self.at is not None:
            return "leave" if self.done >= self.at else "go"
        return "wait" if self.cap is not None and self.done >= self.cap else "go"

    def set_cap(self) -> int:
        """Return the cap of this worker. The first call chooses it."""
        if self.cap is None:
            self.cap = self.done + AHEAD
        return self.cap


def largest_cap(caps: list[int]) -> int:
    """Return the leave step for the caps of all workers: the largest cap, which no worker has passed."""
    return max(caps)


def encode_leave_step(at: int, *, saves: bool) -> str:
    """Encode the leave step and whether to save in one string, because they must be published together."""
    return f"{at} saving" if saves else str(at)


def decode_leave_step(text: str) -> tuple[int, bool]:
    at, _, saving = text.partition(" ")
    return int(at), bool(saving)
