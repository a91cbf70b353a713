"""When states are saved and loaded: rank 0 does it, and all wait."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from elasticrs.metrics import prof
from elasticrs.train.checkpoint.api import CheckpointError, get_checkpoint_manager

if TYPE_CHECKING:
    from elasticrs.train.checkpoint.api import CheckpointManager
    from elasticrs.train.coordinator import Coordinator
    from elasticrs.train.state import State

__all__ = ["CheckpointUtil"]

_log = logging.getLogger("elasticrs.train")

KEY = "default"
"""The stream that a state is written to."""

_MAX_REASON = 500
"""Bytes of rank 0's error that the others tell."""


class CheckpointUtil:
    """Saves and loads the states of a loop: rank 0 reads and writes, the others get the state by ``sync``.

    Args:
        coordinator: of the loop.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @prof
    def load_checkpoint(self, state: State, rank: int) -> bool:
        """Load the newest checkpoint, if there is one. All workers call it together.

        Args:
            state: to load into.
            rank: of this worker.

        Returns:
            True if rank 0 has loaded one.

        Raises:
            CheckpointError: it cannot be used; on all workers.
        """
        found, trouble, reason = 0, None, b""
        if rank == 0 and (manager := get_checkpoint_manager()) is not None:
            try:
                found = int(_load(manager, state))
            except Exception as error:
                # The others are told before it is raised: they wait.
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
        """Write a checkpoint. All workers call it together, and all return when it is there.

        A disk that does not take it costs this checkpoint, not the job: a line says so.

        Args:
            state: to write.
            rank: of this worker.

        Returns:
            False on rank 0 if it was not written.
        """
        is_saved = True
        if rank == 0 and (manager := get_checkpoint_manager()) is not None:
            try:
                with self._coordinator.alone():
                    _save(manager, state)
            except Exception as error:
                if (of_disk := _of_the_disk(error)) is None:
                    raise
                _log.warning("no checkpoint was written: %s", of_disk)
                is_saved = False
        self._coordinator.barrier()
        return is_saved


def _of_the_disk(error: BaseException | None) -> OSError | None:
    """What an error is about, if that is a disk: ``torch.save`` makes a RuntimeError of it."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _load(manager: CheckpointManager, state: State) -> bool:
    checkpoint = manager.get_latest_checkpoint()
    if checkpoint is None:
        return False
    with checkpoint.open_input_stream(KEY) as stream:
        state.load(stream)
    return True


def _save(manager: CheckpointManager, state: State) -> None:
    checkpoint = manager.create_checkpoint()
    try:
        with checkpoint.open_output_stream(KEY) as stream:
            state.save(stream)
        checkpoint.commit()
    finally:
        checkpoint.discard()
