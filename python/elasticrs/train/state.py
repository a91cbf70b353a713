"""Classes for what a train step returns: the training state of a job, and statistics about the worker."""

from __future__ import annotations

import logging
import pickle
import sys
from abc import ABC, abstractmethod
from typing import IO, Any

__all__ = ["SimpleWorkerStats", "State", "WorkerStats"]

_log = logging.getLogger("elasticrs.train")


class State(ABC):
    """Everything that a train step changes. The constructor must create the same state on every worker."""

    @abstractmethod
    def sync(self, world_size: int, rank: int) -> None:
        """Synchronize the state with the other workers, and adapt it to the number of workers.

        All workers call this together at the start of each round. Usually, the most advanced worker sends its
        state to all, and every worker recreates the model's wrapper, the optimizer and the data loader.
        """

    def capture_snapshot(self) -> Any:
        """Return a copy of what a step changes, so that a failed step can be undone.

        Return ``None`` if failed steps must not be undone.
        """
        return None

    def apply_snapshot(self, snapshot: Any) -> None:
        """Restore a snapshot, maybe of another process. :meth:`sync` is called afterwards."""
        if snapshot is not None:
            raise NotImplementedError(f"{type(self).__name__} has capture_snapshot, but no apply_snapshot")

    def state_dict(self) -> Any:
        """Return everything that a new process needs: weights, optimizer state and progress.

        Checkpoints and the final state contain the result. Tensors, numbers, strings and plain containers can
        be loaded without running code. The default is :meth:`capture_snapshot`, for torchelastic 0.1
        programs.
        """
        if is_torchelastic_program():
            return self.capture_snapshot()
        raise NotImplementedError(f"{type(self).__name__} has no state_dict")

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore what :meth:`state_dict` returned, maybe in another process, before a :meth:`sync`."""
        if not is_torchelastic_program():
            raise NotImplementedError(f"{type(self).__name__} has no load_state_dict")
        self.apply_snapshot(state_dict)

    def save(self, stream: IO[bytes]) -> None:
        """Write :meth:`state_dict` with ``torch.save``. Raise ``TypeError`` if that is not possible."""
        import torch

        content = self.state_dict()
        if content is None:
            raise TypeError(f"the state {type(self).__name__} has nothing to save: its state_dict is None")
        torch.save(content, stream)

    def load(self, stream: IO[bytes]) -> None:
        """Read what :meth:`save` wrote to a seekable stream, and pass it to :meth:`load_state_dict`.

        Content that ``torch.load`` rejects with ``weights_only=True`` is unpickled with a warning, because
        unpickling can run code. Another worker's content is unpickled only if the job has a token. GPU
        tensors are loaded onto this process's current GPU, or into main memory if it has none.
        """
        _load(self, stream, may_run_code=True)

    def should_save_checkpoint(self, rank: int) -> bool:  # noqa: ARG002 -- used by subclasses
        """Return true, on all workers, if it is time for a checkpoint. Called after every step."""
        return False


class WorkerStats(ABC):
    """Base class for statistics returned by a train step."""

    @abstractmethod
    def get_progress_rate(self) -> float | None:
        """Return a number that is larger for faster workers, such as samples per second, or ``None``."""


class SimpleWorkerStats(WorkerStats):
    """Worker statistics that contain only a given progress rate."""

    def __init__(self, progress_rate: float | None) -> None:
        self.progress_rate = progress_rate

    def get_progress_rate(self) -> float | None:
        return self.progress_rate


def load_from_peer(state: State, stream: IO[bytes], *, is_protected: bool) -> None:
    """Load the state that another worker has written with :meth:`State.save`. ``is_protected`` is true if
    only processes with the job's token could have sent it. Otherwise, the default :meth:`State.load` raises
    ``UnpicklingError`` for objects other than tensors and plain containers, which could run code.
    """
    if type(state).load is State.load:
        _load(state, stream, may_run_code=is_protected)
    else:
        state.load(stream)


def _load(state: State, stream: IO[bytes], *, may_run_code: bool) -> None:
    import torch

    def on_this_gpu(storage: Any, location: str) -> Any:
        # Another rank may have saved tensors on a GPU that this rank must not use.
        if not location.startswith("cuda"):
            return None  # torch's default
        return storage.cuda(torch.cuda.current_device()) if torch.cuda.is_available() else storage

    start = stream.tell()
    try:
        content = torch.load(stream, weights_only=True, map_location=on_this_gpu)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        if not may_run_code:
            raise pickle.UnpicklingError(
                "it holds more than tensors and plain containers, and unpickling it could run code that"
                f" anyone who reaches the store has written: set ELASTICRS_TOKEN ({reason})"
            ) from error
        _log.warning(
            "the checkpoint holds more than tensors and plain containers, so it is unpickled in full, "
            "which can run code from the file: %s",
            reason,
        )
        stream.seek(start)
        content = torch.load(stream, weights_only=False, map_location=on_this_gpu)
    state.load_state_dict(content)


def why_not_saved(state: State) -> str | None:
    """Return why the state cannot be saved or loaded, and how to fix it; ``None`` if it can."""
    kind, is_old = type(state), is_torchelastic_program()
    saves = ("state_dict", "save", *(("capture_snapshot",) if is_old else ()))
    loads = ("load_state_dict", "load", *(("apply_snapshot",) if is_old else ()))
    missing = [
        f"neither {names[0]} nor {names[1]}"
        for names in (saves, loads)
        if all(getattr(kind, name) is getattr(State, name) for name in names)
    ]
    if not missing:
        return None
    return (
        f"{kind.__name__} has {' and '.join(missing)}: define state_dict and load_state_dict with everything "
        "that a new process needs to continue"
    )


def is_torchelastic_program() -> bool:
    """Return true if this program imports ``torchelastic``, and may have no ``state_dict`` methods."""
    return "torchelastic" in sys.modules
