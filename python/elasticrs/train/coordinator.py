"""Interface of coordinators, and the exceptions that end the training loop or make it repeat a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from elasticrs._engine.job.value import Value
from elasticrs.errors import NonRetryable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticrs.train.state import State, WorkerStats

__all__ = ["Coordinator", "FinalState", "NonRetryableException", "RetryableException", "StopException"]


class FinalState(Value):
    """Final state of a job, for a worker that starts after training has finished.

    Args:
        content: Bytes that ``State.save`` wrote on another worker. ``None`` if no living worker has a copy.
        in_checkpoint: True if the newest checkpoint holds the final state.
        trouble: Message for the user that explains why there is no content, and what the user can do.
        is_protected: True if only processes that know the job's token could have chosen the content.
    """

    content: bytes | None
    in_checkpoint: bool
    trouble: str
    is_protected: bool = False


class Coordinator(ABC):
    """Runs the rendezvous between a job's workers, and tells the training loop when to do what.

    After each step, the loop asks whether to start a new rendezvous round, save a checkpoint, or stop. The
    answers must be the same on all workers.

    Attributes:
        rounds_before: Number of earlier rounds of the job that this worker knows of.
        takes_requests: True if this coordinator implements :meth:`request` and the related methods.
        others_come_back: True if a worker that exits is replaced. False if its agent restarts all workers.
        keeps_final_state: True if workers that start after the training has ended can get the final state.
    """

    rounds_before: int = 0
    keeps_final_state: bool = False
    takes_requests: bool = False
    others_come_back: bool = True

    @abstractmethod
    def rendezvous_barrier(self) -> tuple[Any, int, int]:
        """Destroy the previous process group, wait for the next round, and return its store, rank and size.

        Raises:
            StopException: the job is closed.
            NonRetryableException: this process cannot join another round.
        """

    @abstractmethod
    def init_process_group(self) -> None:
        """Create the default process group for the current rendezvous round."""

    def barrier(self) -> None:  # noqa: B027 -- optional to override
        """Wait for all workers, without the process group. After a timeout, all raise ``RuntimeError``."""

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Send these numbers to all workers, and return every worker's numbers, ordered by rank.

        All workers must call this with equally many numbers.
        """
        from elasticrs.train.distributed import all_gather_longs

        return all_gather_longs(numbers)

    def alone(self) -> AbstractContextManager[None]:
        """Return a context manager for a block of work that this worker does alone.

        The work must not use collectives. It has no time limit.
        """
        return nullcontext()

    def should_save_checkpoint(self) -> bool:
        """Return true if the job's environment requests a checkpoint. Called after every step."""
        return False

    @abstractmethod
    def should_rendezvous(self, state: State) -> bool:
        """Return true if the workers must start a new round. Called after every step."""

    def request(self, *, leave: bool) -> None:
        """Record that a checkpoint was requested. Do nothing else, because signal handlers call this.

        All workers then save after the same step. After that step, :meth:`should_rendezvous` and
        :meth:`should_save_before_meeting` return true. With ``leave``, so does :meth:`should_leave`.
        """
        raise NotImplementedError

    @property
    def has_round(self) -> bool:
        """True if a rendezvous round is running and no new round is due."""
        return True

    def should_save_before_meeting(self) -> bool:
        """Return true if a requested checkpoint must be saved now, before the next round."""
        return False

    def saved(self, is_saved: bool) -> None:  # noqa: B027 -- optional to override
        """Report whether a requested checkpoint was written. Called on all workers before the next round."""

    def should_leave(self) -> bool:
        """Return true if this worker must leave the job now, instead of joining the next round."""
        return False

    def was_broken_off(self, *, is_meeting: bool) -> bool:  # noqa: ARG002 -- used by subclasses
        """Return true if this worker's error was caused by the loss of a member or by the end of the round.

        Called after a retryable error. May wait until the store reports a lost worker. Only the worker that
        caused the error counts it against ``max_failures``; the limit for other workers is higher.
        ``is_meeting`` is true if the error occurred before the round's ``state.sync``.
        """
        return False

    @abstractmethod
    def should_stop_training(self) -> bool:
        """Return true if the job has finished."""

    def announce_end(self) -> None:  # noqa: B027 -- optional to override
        """Announce that this worker has no more data, before its last :meth:`rendezvous_barrier`.

        The other workers must stop after the same number of steps, because a later step would wait for this
        worker in vain.
        """

    def keep_final_state(self, content: memoryview | None, *, in_checkpoint: bool) -> None:  # noqa: B027 -- optional to override
        """Keep the final state, for workers that start later, before :meth:`signal_training_done`.

        Args:
            content: Bytes that ``State.save`` wrote. ``None`` if this worker has no copy.
            in_checkpoint: True if the newest checkpoint holds the final state.
        """

    def final_state(self) -> FinalState | None:
        """Return a finished job's final state, if any. Raise ``NonRetryableException`` if it is lost."""
        return None

    @abstractmethod
    def signal_training_done(self) -> None:
        """Close the job permanently. Workers that join later receive :class:`StopException`."""

    def monitor_progress(self, state: State, worker_stats: WorkerStats | None) -> None:  # noqa: B027 -- optional to override
        """Compare the workers' statistics of a step, to find slow workers. Called after every step."""

    def report_progress(self, state: State) -> None:  # noqa: B027 -- optional to override
        """Record that a step is complete. Called before the next step."""

    def on_error(self, e: Exception) -> None:  # noqa: B027 -- optional to override
        """React to an exception from a step or a rendezvous, before the loop handles it."""

    def leave(self) -> None:  # noqa: B027 -- optional to override
        """Leave the job, because an exception ends the loop. Other workers must not wait for this worker."""


class StopException(Exception):  # noqa: N818 -- torchelastic's name
    """Raised to end the training loop when the job is closed."""


class NonRetryableException(NonRetryable):
    """Raised by a train step to end the job, as with :class:`elasticrs.errors.NonRetryable`."""


class CannotContinueError(NonRetryableException):
    """Raised if this process cannot continue, although other workers or another attempt may succeed."""

    may_succeed_later = True


class RetryableException(RuntimeError):  # noqa: N818 -- named like the others
    """Raised by a train step, like any other ``RuntimeError``, to repeat it after a new rendezvous round."""
