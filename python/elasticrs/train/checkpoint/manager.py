"""Base classes for checkpoint storage, and this process's checkpoint manager."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import IO, TYPE_CHECKING

from elasticrs.train.errors import CannotContinueError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "get_checkpoint_manager",
    "set_checkpoint_manager",
]


class CheckpointError(CannotContinueError):
    """Raised when a checkpoint cannot be used."""


class Checkpoint(ABC):
    """A checkpoint: a set of named byte streams."""

    @abstractmethod
    def open_output_stream(self, key: str) -> IO[bytes]:
        """Return a stream for writing. The caller must close it."""

    @abstractmethod
    def open_input_stream(self, key: str) -> IO[bytes]:
        """Return a stream for reading. The caller must close it."""

    @abstractmethod
    def commit(self) -> None:
        """Commit the checkpoint: make everything written so far visible. Idempotent."""

    @abstractmethod
    def discard(self) -> None:
        """Remove the checkpoint if it has not been committed. Idempotent."""


class CheckpointManager(ABC):
    """Base class for storage that holds a job's checkpoints."""

    @abstractmethod
    def create_checkpoint(self) -> Checkpoint:
        """Return a new checkpoint. The caller writes its streams, then commits it."""

    @abstractmethod
    def get_checkpoint(self, sequence_id: int) -> Checkpoint:
        """Return the committed checkpoint with this number. Raise an error if it does not exist."""

    @abstractmethod
    def get_latest_checkpoint(self) -> Checkpoint | None:
        """Return the newest committed checkpoint, or ``None`` if there is none."""

    @abstractmethod
    def list_checkpoints(self) -> Sequence[Checkpoint]:
        """Return all committed checkpoints, newest first."""


_manager: CheckpointManager | None = None


def set_checkpoint_manager(checkpoint_manager: CheckpointManager | None) -> None:
    """Set the checkpoint manager of this process. All workers must call this before training starts.

    Args:
        checkpoint_manager: Manager that saves and loads the checkpoints. ``None`` to disable checkpoints.
    """
    global _manager  # noqa: PLW0603 -- process-wide
    _manager = checkpoint_manager


def get_checkpoint_manager() -> CheckpointManager | None:
    """Return the manager set by :func:`set_checkpoint_manager`."""
    return _manager
