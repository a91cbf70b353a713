"""Votes that workers exchange at the start of each round, and pure functions that evaluate them.

No votes are sent during a round, so a disagreement first shows as a failure: if one worker saves a checkpoint
after a step and another worker does not, the first worker waits for the others, and the next collective of
the second worker fails. All workers then start a new round, where :func:`disagreement` finds the reason.
"""

from __future__ import annotations

from elasticrs._engine.job.value import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class Vote(Record):
    """Information that a worker sends to all others at the start of a round, as a list of integers. A flag is
    1 if it is set and 0 otherwise.

    Args:
        has_manager: flag that is set if the worker has a checkpoint manager.
        is_loaded: flag that is set if the state of the worker belongs to this run of the job, so it loads no
            checkpoint.
        at_the_end: flag that is set if the worker knows that a worker has run out of data.
        next_round: random number. The number of rank 0 becomes the name of the new round.
        last_round: name of the worker's last round. 0 if it has been in no round.
        asked: number of calls of ``should_save_checkpoint`` in the last round.
        said_yes: number of the last of these calls that returned true, counted from 1. 0 if none did.
        is_saving: flag that is set if that call was followed by a save that the worker has not completed.
        next_step: number of the step that comes next in the last round, counted from 1. 0 if the worker did
            not complete the sync of that round, or if the program was not written for torchelastic 0.1.
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
    """Return true if all workers are at the same step and one has run out of data. Always false for programs
    that were not written for torchelastic 0.1.

    It is enough that one worker ran out of data, because the others may have left the round before they tried
    to take the next step.

    Args:
        votes: votes of all workers, by rank.
    """
    first = votes[0]
    return (
        first.next_step > 0
        and any(vote.at_the_end for vote in votes)
        and all((vote.last_round, vote.next_step) == (first.last_round, first.next_step) for vote in votes)
    )


def disagreement(votes: Sequence[Vote]) -> str | None:
    """Return a message if the workers disagree about the checkpoint manager or about when to save; ``None``
    if they agree.

    Args:
        votes: votes of all workers, by rank.
    """
    if len({vote.has_manager for vote in votes}) > 1:
        with_one = [rank for rank, vote in enumerate(votes) if vote.has_manager]
        without = [rank for rank, vote in enumerate(votes) if not vote.has_manager]
        return f"set_checkpoint_manager was called on {_ranks(with_one)}, but not on {_ranks(without)}"
    for first in votes:
        if not first.is_saving:
            continue
        peers = [vote for vote in votes if vote.last_round == first.last_round]
        # Ignore workers whose last save is later, because they must also have taken part in the save that
        # `first` has not completed.
        against = [vote for vote in peers if vote.asked >= first.said_yes > vote.said_yes]
        if against:
            return (
                f"should_save_checkpoint differs: False on {len(against)} of {len(peers)} workers, "
                f"True on others, after step {first.said_yes} of the last round"
            )
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
