"""Who brings the workers together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from elasticrs.job.value import Value
from elasticrs.train.errors import NonRetryableException, StopException

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticrs.train.state import State
    from elasticrs.train.worker_stats import WorkerStats

__all__ = ["Coordinator", "FinalState", "NonRetryableException", "StopException"]


class FinalState(Value):
    """Final state of a job, for a worker that starts after the training has ended.

    Args:
        content: Bytes that ``State.save`` wrote on another worker. ``None`` if no living worker has a copy.
        in_checkpoint: True if the newest checkpoint holds the final state.
        trouble: Message to the user that says why there is no content, and what to do.
    """

    content: bytes | None
    in_checkpoint: bool
    trouble: str


class Coordinator(ABC):
    """Runs the rendezvous of a job's workers and tells the training loop when to meet, save and stop.

    Attributes:
        rounds_before: Number of rounds that the job had before the current one, as far as it is known.
        takes_requests: True if this coordinator implements :meth:`request` and the related methods.
        others_come_back: True if a worker that exits is replaced. False if its agent restarts all workers.
        keeps_final_state: True if this coordinator can pass the final state to workers that start after the
            training has ended.
    """

    rounds_before: int = 0
    keeps_final_state: bool = False
    takes_requests: bool = False
    others_come_back: bool = True

    @abstractmethod
    def rendezvous_barrier(self) -> tuple[Any, int, int]:
        """End the process group of the last round, wait for the next round.

        Returns:
            A store (``torch.distributed.Store``) that the workers of the round share, the rank of this one,
            and how many they are.

        Raises:
            StopException: the job is closed.
            NonRetryableException: there will be no round for this process.
        """

    @abstractmethod
    def init_process_group(self) -> None:
        """Make the default process group of the round."""

    def barrier(self) -> None:  # noqa: B027 -- may be left out
        """Wait until all workers of the round are here, over the control plane, whose time limit is its own.

        Raises:
            RuntimeError: on all, if one is missing.
        """

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all workers, by rank. All call it together, with as many numbers.

        Args:
            numbers: of this worker.
        """
        from elasticrs.train.distributed import all_gather_longs

        return all_gather_longs(numbers)

    def alone(self) -> AbstractContextManager[None]:
        """What this worker does in this block is in no collective, and may take any time."""
        return nullcontext()

    def should_save_checkpoint(self) -> bool:
        """True if the platform asks for a checkpoint; asked after every step, the same on all workers."""
        return False

    @abstractmethod
    def should_rendezvous(self, state: State) -> bool:
        """True if the workers shall meet anew, for instance to let others in; asked after every step, the
        same on all workers.

        Args:
            state: after the step.
        """

    def request(self, *, leave: bool) -> None:
        """Somebody asks this worker for a checkpoint; called by signal handlers, so it only takes a note.

        All workers then save at one step, before they meet anew: :meth:`should_rendezvous` and
        :meth:`should_save_before_meeting` become true.

        Args:
            leave: this worker shall leave the job there, in order: :meth:`should_leave` becomes true.
        """
        raise NotImplementedError

    @property
    def has_round(self) -> bool:
        """True if the workers have met, and are not about to meet anew."""
        return True

    def should_save_before_meeting(self) -> bool:
        """True if a checkpoint was asked for, and is to be saved now; asked when :meth:`should_rendezvous`
        was true, the same on all workers.
        """
        return False

    def saved(self, is_saved: bool) -> None:  # noqa: B027 -- may be left out
        """Called when what was asked for is done: on all workers, before they meet.

        Args:
            is_saved: the checkpoint is there.
        """

    def should_leave(self) -> bool:
        """True if this worker leaves the job now; asked when :meth:`should_rendezvous` was true."""
        return False

    def was_broken_off(self, *, is_meeting: bool) -> bool:  # noqa: ARG002 -- for those that override it
        """Return true if an error was caused by a lost member or by the end of the round.

        The loop calls this after a step or a rendezvous raised a retryable error, before this worker leaves
        the round. The call may wait briefly for the store to report a lost member.

        Such an error counts little against ``max_failures``, because the worker that caused it counts it too.

        Args:
            is_meeting: True if the error was raised before ``sync``.
        """
        return False

    @abstractmethod
    def should_stop_training(self) -> bool:
        """True if the job has ended."""

    def announce_end(self) -> None:  # noqa: B027 -- may be left out
        """Called when the data of this worker have ended, before its last :meth:`rendezvous_barrier`.

        A worker that has not finished the last step yet shall do so; none shall wait for this one in a later
        step.
        """

    def keep_final_state(self, content: memoryview | None, *, in_checkpoint: bool) -> None:  # noqa: B027 -- may be left out
        """Keep the final state for workers that start after the training has ended.

        The loop calls this on all workers when they have the same state, before :meth:`signal_training_done`.

        Args:
            content: Bytes that ``State.save`` wrote. ``None`` if this worker has no copy.
            in_checkpoint: True if the newest checkpoint holds the final state.
        """

    def final_state(self) -> FinalState | None:
        """Return the final state of a job that ended without this worker.

        ``None`` if no final state is known, for instance because this coordinator does not keep final states.

        Raises:
            NonRetryableException: This worker cannot get the final state.
        """
        return None

    @abstractmethod
    def signal_training_done(self) -> None:
        """Close the job permanently. Workers that join later get :class:`~elasticrs.train.StopException`."""

    def monitor_progress(self, state: State, worker_stats: WorkerStats | None) -> None:  # noqa: B027 -- may be left out
        """Look for workers that are slower than others; called after every step.

        Args:
            state: after the step.
            worker_stats: what the step returned.
        """

    def report_progress(self, state: State) -> None:  # noqa: B027 -- may be left out
        """Called when a step is done and the next one follows.

        Args:
            state: after the step.
        """

    def on_error(self, e: Exception) -> None:  # noqa: B027 -- may be left out
        """Called with every error of a step or a meeting, before the loop does what follows from it.

        Args:
            e: the error.
        """

    def leave(self) -> None:  # noqa: B027 -- may be left out
        """Called when the loop ends by an exception: the others shall not wait for this worker any more."""
