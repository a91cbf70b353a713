"""Base classes for checkpoint storage, and a class with which all workers save and load together."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import IO, TYPE_CHECKING, Any, cast

from elasticrs.metrics import prof
from elasticrs.train.coordinator import CannotContinueError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self

    from elasticrs.train.coordinator import Coordinator
    from elasticrs.train.state import State

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointSaver",
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
        """Make everything written so far visible as a checkpoint. Further calls have no effect."""

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
    """Set or (``None``) remove this process's checkpoint manager. All workers call this before training."""
    global _manager  # noqa: PLW0603 -- process-wide
    _manager = checkpoint_manager


def get_checkpoint_manager() -> CheckpointManager | None:
    """Return the manager set by :func:`set_checkpoint_manager`."""
    return _manager


_log = logging.getLogger("elasticrs.train")

KEY = "default"
"""Name of the stream in a checkpoint that contains the training state."""

_MAX_REASON = 500
"""Maximum number of bytes of rank 0's error message that are sent to the other workers."""


class CheckpointSaver:
    """Saves and loads the state of a training loop on rank 0. Other workers receive it through ``sync``."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @prof
    def load_checkpoint(self, state: State, rank: int) -> bool:
        """Load the newest checkpoint, if any, on rank 0. Return true on all workers if there was one.

        If rank 0 cannot load it, all workers raise ``CheckpointError``.
        """
        found, trouble, reason = 0, None, b""
        if rank == 0:
            try:
                found = int(load_newest(state))
            except Exception as error:
                # Do not raise yet, because the other workers wait for a message from rank 0.
                trouble, reason = error, f"{type(error).__name__}: {error}".encode()[:_MAX_REASON]
                found = -len(reason)
        found = self._coordinator.exchange([found])[0][0]
        if found < 0:
            told = self._coordinator.exchange(list(reason) or [0] * -found)[0]
            raise trouble or CheckpointError(
                f"rank 0 cannot load the checkpoint: {bytes(told).decode(errors='replace')}"
            )
        return bool(found)

    @prof
    def save_checkpoint(self, state: State, rank: int) -> bool:
        """Write a checkpoint on rank 0 while all workers wait. All return false if the disk fails."""
        is_saved = False
        if rank == 0 and (manager := get_checkpoint_manager()) is not None:
            with self._coordinator.alone():
                is_saved = _save(manager, state)
        return bool(self._coordinator.exchange([int(is_saved)])[0][0])


def load_newest(state: State) -> bool:
    """Load the newest checkpoint, if any. Raise ``CheckpointError`` if it cannot be used."""
    manager = get_checkpoint_manager()
    checkpoint = None if manager is None else manager.get_latest_checkpoint()
    if checkpoint is None:
        return False
    with checkpoint.open_input_stream(KEY) as stream:
        state.load(stream)
    return True


def _save(manager: CheckpointManager, state: State) -> bool:
    """Save the state. Return false if the disk failed. Other errors are raised, as bugs of the program."""
    failed: list[OSError] = []
    try:
        checkpoint = manager.create_checkpoint()
        try:
            with _Watched(checkpoint.open_output_stream(KEY), failed) as stream:
                state.save(cast("IO[bytes]", stream))
            checkpoint.commit()
        finally:
            checkpoint.discard()
    except Exception as error:
        trouble = failed[0] if failed else _os_error(error)
        if trouble is None:
            raise
        _log.warning("no checkpoint was written: %s", trouble)
        return False
    return True


def _os_error(error: BaseException | None) -> OSError | None:
    """Return the first OSError among the exception and its causes (not its ``__context__``)."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, OSError):
            return error
        seen.append(error)
        error = error.__cause__
    return None


class _Watched:
    """Stream wrapper that records write errors, because ``torch.save`` replaces them with a RuntimeError."""

    def __init__(self, stream: IO[bytes], failed: list[OSError]) -> None:
        self._stream = stream
        self._failed = failed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, data: Any) -> int:
        return cast("int", self._noted(self._stream.write, data))

    def flush(self) -> None:
        self._noted(self._stream.flush)

    def close(self) -> None:
        self._noted(self._stream.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _noted(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except OSError as error:
            self._failed.append(error)
            raise
