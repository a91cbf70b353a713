"""What keeps checkpoints, and which one this process uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import IO, TYPE_CHECKING

from elasticrs.train.errors import NonRetryableException

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "get_checkpoint_manager",
    "set_checkpoint_manager",
]


class CheckpointError(NonRetryableException):
    """A checkpoint cannot be used."""


class Checkpoint(ABC):
    """One checkpoint: streams by name."""

    @abstractmethod
    def open_output_stream(self, key: str) -> IO[bytes]:
        """Return a stream to write to; the caller closes it."""

    @abstractmethod
    def open_input_stream(self, key: str) -> IO[bytes]:
        """Return a stream to read from; the caller closes it."""

    @abstractmethod
    def commit(self) -> None:
        """Make it visible, with all that has been written. Idempotent."""

    @abstractmethod
    def discard(self) -> None:
        """Remove it, unless it is committed. Idempotent."""


class CheckpointManager(ABC):
    """The checkpoints of a job."""

    @abstractmethod
    def create_checkpoint(self) -> Checkpoint:
        """Return a new one, to be written and committed."""

    @abstractmethod
    def get_checkpoint(self, sequence_id: int) -> Checkpoint:
        """Return a committed one by its number; raises if there is none."""

    @abstractmethod
    def get_latest_checkpoint(self) -> Checkpoint | None:
        """Return the newest committed one; ``None`` if there is none."""

    @abstractmethod
    def list_checkpoints(self) -> Sequence[Checkpoint]:
        """Return all committed ones, the newest first."""


_manager: CheckpointManager | None = None


def set_checkpoint_manager(checkpoint_manager: CheckpointManager | None) -> None:
    """Choose where this process saves and loads states; all workers call it, before they train.

    Args:
        checkpoint_manager: of the job's checkpoints; ``None`` for none.
    """
    global _manager  # noqa: PLW0603 -- of the process
    _manager = checkpoint_manager


def get_checkpoint_manager() -> CheckpointManager | None:
    """Return what :func:`set_checkpoint_manager` has set."""
    return _manager
