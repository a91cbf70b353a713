"""What a job changes while it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import IO, Any

__all__ = ["State"]


class State(ABC):
    """Everything that a train step changes. The constructor makes the same state on every worker, from the
    arguments of the job alone, without a message.
    """

    @abstractmethod
    def sync(self, world_size: int, rank: int) -> None:
        """Make the states of all workers equal, and usable in a world of this size.

        All workers call it together: at the start, and each time that they have met anew. Usually the state
        that has come furthest is sent to all, and the wrapper of the model, the optimizer and the data loader
        are made again.

        Args:
            world_size: how many workers there are.
            rank: of this one.
        """

    def capture_snapshot(self) -> Any:
        """Return a picture of what changes, kept in memory; taken before every step.

        With ``None`` nothing is rolled back: a step that failed halfway leaves what it has done.
        """
        return None

    def apply_snapshot(self, snapshot: Any) -> None:
        """Set what changes to what a snapshot holds. :meth:`sync` follows.

        Args:
            snapshot: what :meth:`capture_snapshot` returned, of this object or of one in another process.
        """
        if snapshot is not None:
            raise NotImplementedError(f"{type(self).__name__} has capture_snapshot, but no apply_snapshot")

    def save(self, stream: IO[bytes]) -> None:
        """Write a checkpoint: the snapshot, as ``torch.save`` writes it.

        Args:
            stream: to write to.
        """
        import torch

        torch.save(self.capture_snapshot(), stream)

    def load(self, stream: IO[bytes]) -> None:
        """Read what :meth:`save` wrote. :meth:`sync` follows.

        A snapshot may hold any object, so this unpickles: read only what you wrote.

        Args:
            stream: to read from.
        """
        import torch

        self.apply_snapshot(torch.load(stream, weights_only=False))

    def should_save_checkpoint(self, rank: int) -> bool:  # noqa: ARG002 -- for those that override it
        """True if it is time for a checkpoint; asked after every step, where checkpoints are configured.

        All workers must give the same answer: each then waits for the one that writes.

        Args:
            rank: of this worker.
        """
        return False
