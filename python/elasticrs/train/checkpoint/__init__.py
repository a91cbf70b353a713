"""Save checkpoints of the training state, once :func:`set_checkpoint_manager` has been called."""

from __future__ import annotations

from elasticrs.train.checkpoint.api import CheckpointUtil
from elasticrs.train.checkpoint.files import FileSystemCheckpointManager
from elasticrs.train.checkpoint.manager import (
    Checkpoint,
    CheckpointError,
    CheckpointManager,
    get_checkpoint_manager,
    set_checkpoint_manager,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointUtil",
    "FileSystemCheckpointManager",
    "get_checkpoint_manager",
    "set_checkpoint_manager",
]
