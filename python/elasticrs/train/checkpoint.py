"""Save checkpoints of the training state, once :func:`set_checkpoint_manager` has been called.

:class:`FileSystemCheckpointManager` stores each checkpoint as a subdirectory named by its number.

- **SAVE-1** a checkpoint's directory gets its final name, a number, when all its data is on disk. If the
  writer dies before that, the next writer removes the directory.
- **SAVE-2** the length and checksum of every stream are recorded, and checked before the stream is read.
- **SAVE-3** the newest complete checkpoint is loaded. A damaged checkpoint is skipped with a log message. A
  checkpoint of another job, or in a newer format, is an error, because users would not expect that an older
  checkpoint is loaded instead.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
import zlib
from abc import ABC, abstractmethod
from contextlib import closing, suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Any, cast
from urllib.parse import quote

from elasticrs.metrics import prof
from elasticrs.train.coordinator import CannotContinueError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from elasticrs.train.coordinator import Coordinator
    from elasticrs.train.state import State

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointUtil",
    "FileSystemCheckpointManager",
    "get_checkpoint_manager",
    "set_checkpoint_manager",
]

_log = logging.getLogger("elasticrs.train")


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
        """Load the newest checkpoint, if any, on rank 0. Return true on all workers if there was one. If rank
        0 cannot load it, all workers raise ``CheckpointError``.
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
    stream: _WatchedStream | None = None
    try:
        checkpoint = manager.create_checkpoint()
        try:
            stream = _WatchedStream(checkpoint.open_output_stream(KEY))
            with closing(stream):
                state.save(cast("IO[bytes]", stream))
            checkpoint.commit()
        finally:
            checkpoint.discard()
    except Exception as error:
        trouble = (stream and stream.error) or _os_error(error)
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


class _WatchedStream:
    """Stream that stores its first ``OSError``, because ``torch.save`` raises a RuntimeError instead."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._stream, name)
        return partial(self._call, found) if callable(found) else found

    def _call(self, method: Any, *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except OSError as error:
            self.error = self.error or error
            raise


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


FORMAT = 1
_MANIFEST = "checkpoint.json"
_UNFINISHED = "unfinished-"
_BLOCK = 1 << 20


class _TornError(CheckpointError): ...


class FileSystemCheckpointManager(CheckpointManager):
    """Checkpoint manager that stores checkpoints in a directory, which every possible rank 0 can read.

    Args:
        checkpoint_dir: Directory for the checkpoints. It is created if it does not exist.
        job: Job name to store in the checkpoints. Checkpoints with another job name are rejected.
        keep: Number of newest checkpoints to keep, at least 1. ``None`` to keep all.
    """

    def __init__(
        self, checkpoint_dir: str | os.PathLike[str], job: str | None = None, keep: int | None = None
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep: got {keep}, expected at least 1")
        self.directory = os.fspath(checkpoint_dir)
        self.job = job
        self._keep = keep
        os.makedirs(self.directory, exist_ok=True)

    @prof
    def create_checkpoint(self) -> Checkpoint:
        self._remove_unfinished()
        return _New(self)

    @prof
    def get_checkpoint(self, sequence_id: int) -> Checkpoint:
        """Return a committed checkpoint. Raise ``CheckpointError`` if it is missing or cannot be used."""
        return _Committed(self._path(sequence_id), self.job)

    @prof
    def get_latest_checkpoint(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, if any. Raise ``CheckpointError`` if none can be used."""
        numbers = self._numbers()
        for number in numbers:
            checkpoint = self._whole(number)
            if checkpoint is not None:
                return checkpoint
        if numbers:
            raise CheckpointError(f"all {len(numbers)} checkpoints in {self.directory} are damaged")
        return None

    def _whole(self, number: int) -> Checkpoint | None:
        try:
            checkpoint = _Committed(self._path(number), self.job)
            checkpoint.verify()
        except _TornError as error:
            _log.warning("%s; trying an older checkpoint", error)
            return None
        return checkpoint

    @prof
    def list_checkpoints(self) -> list[Checkpoint]:
        """Return all committed checkpoints that this job can use, newest first."""
        found: list[Checkpoint] = []
        for number in self._numbers():
            with suppress(CheckpointError):
                found.append(_Committed(self._path(number), self.job))
        return found

    def add(self, unfinished: str) -> str:
        """Rename a new checkpoint to the next number, remove old checkpoints, and return the new path."""
        numbers = self._numbers()
        number = numbers[0] + 1 if numbers else 0
        while True:
            path = self._path(number)
            try:
                os.rename(unfinished, path)
                break
            except OSError:
                # Another process has just written a checkpoint with this number. Keep both.
                if not os.path.exists(path):
                    raise
                number += 1
        _flush(self.directory)
        for old in self._numbers()[self._keep :] if self._keep else ():
            self._prune(old, path)
        return path

    def _prune(self, old: int, new: str) -> None:
        try:
            self._remove(self._path(old))
        except OSError as error:
            _log.warning("checkpoint %s was written, but %s cannot be removed: %s", new, old, error)

    def _path(self, number: int) -> str:
        return os.path.join(self.directory, str(number))

    def _numbers(self) -> list[int]:
        names = os.listdir(self.directory)
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def _remove(self, path: str) -> None:
        # Rename the checkpoint first, because a partly removed one must not look complete.
        gone = tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.directory)
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _remove_unfinished(self) -> None:
        for name in os.listdir(self.directory):
            path = os.path.join(self.directory, name)
            # A locked directory has a living writer, because a writer holds the lock until it exits.
            if name.startswith(_UNFINISHED) and (lock := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


class _New(Checkpoint):
    def __init__(self, manager: FileSystemCheckpointManager) -> None:
        self._manager = manager
        self._path = tempfile.mkdtemp(prefix=_UNFINISHED, dir=manager.directory)
        self._lock = _lock(self._path)
        self._keys: list[str] = []
        self._committed: _Committed | None = None

    def open_output_stream(self, key: str) -> IO[bytes]:
        if key not in self._keys:
            self._keys.append(key)
        return open(os.path.join(self._path, _file_of(key)), "wb")

    def open_input_stream(self, key: str) -> IO[bytes]:
        if self._committed is None:
            raise CheckpointError(f"{self._path} is not committed")
        return self._committed.open_input_stream(key)

    def commit(self) -> None:
        if self._committed is not None:
            return
        streams = {key: _sum(os.path.join(self._path, _file_of(key)), sync=True) for key in self._keys}
        manifest = {"format": FORMAT, "job": self._manager.job, "streams": streams}
        with open(os.path.join(self._path, _MANIFEST), "w", encoding="utf-8") as file:
            json.dump(manifest, file)
            file.flush()
            os.fsync(file.fileno())
        _flush(self._path)
        self._committed = _Committed(self._manager.add(self._path), self._manager.job)
        self._unlock()

    def discard(self) -> None:
        if self._committed is None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class _Committed(Checkpoint):
    def __init__(self, path: str, job: str | None) -> None:
        self._path = path
        self._verified: set[str] = set()
        manifest = _read_manifest(path)
        version = manifest.get("format")
        if isinstance(version, int) and version > FORMAT:
            raise CheckpointError(
                f"checkpoint {path} has format {version}, this version of elasticrs reads up to {FORMAT}"
            )
        self._streams: Any = manifest.get("streams")
        if version != FORMAT or not isinstance(self._streams, dict):
            raise _TornError(f"checkpoint {path} is damaged: {_MANIFEST} is invalid")
        if job is not None and manifest.get("job") != job:
            raise CheckpointError(f"checkpoint {path} is of job {manifest.get('job')!r}, this is {job!r}")

    def open_output_stream(self, key: str) -> IO[bytes]:
        raise CheckpointError(f"checkpoint {self._path} is committed: got a write to {key!r}")

    def open_input_stream(self, key: str) -> IO[bytes]:
        if key not in self._streams:
            raise CheckpointError(f"checkpoint {self._path} has no stream {key!r}")
        self._verify(key)
        return open(os.path.join(self._path, _file_of(key)), "rb")

    def commit(self) -> None: ...

    def discard(self) -> None: ...

    def verify(self) -> None:
        for key in self._streams:
            self._verify(key)

    def _verify(self, key: str) -> None:
        if key in self._verified:
            return
        expected = self._streams[key]
        try:
            found = _sum(os.path.join(self._path, _file_of(key)))
        except OSError as error:
            raise _TornError(f"checkpoint {self._path} is damaged: {key!r}: {error.strerror}") from None
        if found != expected:
            raise _TornError(f"checkpoint {self._path} is damaged: {key!r}: got {found}, expected {expected}")
        self._verified.add(key)


def _read_manifest(path: str) -> dict[str, Any]:
    try:
        with open(os.path.join(path, _MANIFEST), encoding="utf-8") as file:
            manifest = json.load(file)
    except FileNotFoundError:
        if not os.path.isdir(path):
            raise CheckpointError(f"there is no checkpoint {path}") from None
        raise _TornError(f"checkpoint {path} is damaged: it has no {_MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise _TornError(f"checkpoint {path} is damaged: {_MANIFEST}: {error}") from None
    return manifest if isinstance(manifest, dict) else {}


def _file_of(key: str) -> str:
    return f"{quote(key, safe='')}.stream"


def _sum(path: str, *, sync: bool = False) -> dict[str, int]:
    """Return the length and checksum of a file. If ``sync`` is true, flush the file to disk as well."""
    length = total = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            length += len(block)
            total = zlib.crc32(block, total)
        if sync:
            os.fsync(file.fileno())
    return {"bytes": length, "crc32": total}


def _flush(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lock(path: str) -> int | None:
    """Lock a directory and return the descriptor that holds the lock; ``None`` if it cannot be locked."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd
