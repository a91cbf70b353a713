"""Checkpoint API of torchelastic 0.1, also for loops without ``train``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticrs.train.checkpoint.manager import (
    Checkpoint,
    CheckpointManager,
    CheckpointSaver,
    get_checkpoint_manager,
    set_checkpoint_manager,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from elasticrs.train.coordinator import Coordinator
    from elasticrs.train.state import State

__all__ = [
    "Checkpoint",
    "CheckpointBarrier",
    "CheckpointManager",
    "CheckpointUtil",
    "get_checkpoint_manager",
    "set_checkpoint_manager",
]


class CheckpointUtil:
    """Loads and saves checkpoints on rank 0 in a training loop that does not use ``train``.

    Args:
        coordinator: Coordinator that the loop uses.

    Attributes:
        checkpoint_manager: Manager that was set when this object was created. ``None`` if there was none.
        checkpoint_loaded: True if this worker already has this job's state, so it needs no checkpoint.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.checkpoint_manager = get_checkpoint_manager()
        self.checkpoint_loaded = False

    def load_checkpoint(self, state: State, rank: int) -> State:
        """On rank 0, load the newest checkpoint, unless some worker has already loaded one. Return the state.

        All workers must call this method together, and then call ``state.sync``. If rank 0 cannot load the
        checkpoint, all workers raise ``CheckpointError``.
        """
        if self.checkpoint_manager is not None and not any(
            is_loaded for (is_loaded,) in self.coordinator.exchange([int(self.checkpoint_loaded)])
        ):
            CheckpointSaver(self.coordinator).load_checkpoint(state, rank)
        return state

    def set_checkpoint_loaded(self) -> None:
        """Record that this worker has the job's state, so that :meth:`load_checkpoint` does not replace it.

        Call this after ``state.sync``.
        """
        self.checkpoint_loaded = True

    def save_checkpoint(self, state: State, rank: int) -> None:
        """Save the state if the coordinator or the state asks for it, on all workers together."""
        if self.checkpoint_manager is None:
            return
        # Call both methods on every worker, because each may count its calls.
        is_asked = self.coordinator.should_save_checkpoint()
        if state.should_save_checkpoint(rank) or is_asked:
            CheckpointSaver(self.coordinator).save_checkpoint(state, rank)


class CheckpointBarrier:
    """Context manager that waits for all workers when its block ends."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        import torch.distributed

        dist: Any = torch.distributed
        dist.barrier()
