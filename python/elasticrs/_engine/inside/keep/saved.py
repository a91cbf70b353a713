"""Saves the workers' training states on a disk when a job fails or is stopped, so that the next job can go on
from them (``--keep-save``).

A saved state is a folder. For each rank, it has a copy of the file in memory into which the rank copied its
state, in the format of :mod:`.layout`. A record in ``kept.json`` says which copy each rank restores. The
agent copies the bytes of the files without interpreting tensors.
"""

from __future__ import annotations

import errno
import json
import os
from shutil import rmtree

from elasticrs._engine.inside.keep import layout
from elasticrs._engine.inside.keep.layout import Head, Slot, SlotState
from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Protocol

    from elasticrs._engine.inside.keep.choice import Choice, Holding

    class Files(Protocol):
        """The files of the workers; see :class:`elasticrs._engine.workers.keep_files.KeepFiles`."""

        def copy_to(self, local_rank: int, target: int, slot: int | None, *, with_data: bool) -> None: ...


_RECORD = "kept.json"
_VERSION = 1
_PREFIX = "kept-"
_CHUNK = 1 << 24
"""Bytes that one system call copies. There are not more, because a stop of the job waits for the call."""


class Saved(Value):
    """A training state that a job has saved in a folder. The fields after ``own`` are as in :class:`.Choice`.

    Args:
        folder: path of the folder.
        step: the training step after which the state was copied.
        places: for each rank, its file in the folder, in the form of the workers' variable ELASTICRS_KEEP.
        sources: for each rank, the copy that it restores: the rank that made the copy, the slot (a region of
            that rank's file), and the number of the copy.
        own: for each rank, the slot of its file that has its own copy of this step; ``None`` without one.
    """

    folder: str
    step: int
    places: tuple[str, ...]
    sources: tuple[tuple[int, int, int], ...]
    own: tuple[int | None, ...]
    behind: tuple[int, ...]
    kept_by: tuple[int, ...]
    is_replicated: bool
    is_at_death: bool

    def choice(self, world: int) -> Choice:
        """Return what the ranks of an attempt with ``world`` ranks restore if it goes on from this state. If
        each rank saved only its part, and the number of ranks has changed, the result has no step, but says
        why.
        """
        from elasticrs._engine.inside.keep.choice import Choice

        old = len(self.places)
        if world != old and not self.is_replicated:
            why = f"{old} ranks saved step {self.step}, now there are {world}, and each saved only its part"
            return Choice(ranks=old, why=f"{why} in {self.folder}")
        return Choice(
            self.step,
            behind=(*(rank for rank in self.behind if rank < world), *range(old, world)),
            kept_by=self.kept_by,
            ranks=old,
            is_at_death=self.is_at_death,
            is_replicated=self.is_replicated,
            folder=self.folder,
        )

    def readable(self) -> dict[str, Any]:
        """Return what ``Keep.reader`` needs: the step, and where the copies are that together have the whole
        state: those of all ranks, or that of one rank if all ranks have the same state.
        """
        holders = self.sources[: 1 if self.is_replicated else None]
        copies = [[self.places[rank], slot, sequence] for rank, slot, sequence in holders]
        return {"step": self.step, "copies": copies}

    def plan_of(self, rank: int) -> dict[str, Any]:
        """Return the part of the agent's plan (what a worker is to restore) that differs between ranks."""
        is_new = rank >= len(self.places)
        holder, slot, sequence = self.sources[0 if is_new else rank]
        place = {"file": self.places[holder], "slot": slot, "rank": holder, "sequence": sequence}
        own = {} if is_new else {"home": self.places[rank], "own": self.own[rank]}
        return {"large": place, "small": False, "own": None, **own}


def save(
    files: Files, choice: Choice, holdings: Mapping[int, Holding], ranks: Mapping[int, int], parent: str
) -> str:
    """Save the training state of the chosen step in a new folder. Return the path of the folder.

    Args:
        files: the files in memory into which the workers have copied their state.
        choice: the step, and the copy from which each rank would restore it.
        holdings: for each global rank, which copies its file has.
        ranks: global rank of each worker, by local rank.
        parent: the folder of ``--keep-save``, in which the new folder is made.

    Raises:
        OSError: a file cannot be written. The new folder has been removed.
        ValueError: a copy is gone, because a leftover process of a worker still writes to its file.
    """
    assert choice.step is not None
    os.makedirs(parent, exist_ok=True)
    number = 1 + max(_numbers(parent), default=0)
    folder = os.path.join(parent, f"{_PREFIX}{number:06d}")
    unfinished = f"{folder}.{os.getpid()}.unfinished"
    sources, own, names = [], [], []
    os.mkdir(unfinished, 0o700)
    try:
        for local_rank, rank in sorted(ranks.items(), key=lambda pair: pair[1]):
            # If all ranks have the same state, it is enough to save the tensors of one rank.
            holder = choice.sources[0 if choice.is_replicated else rank][0]
            slot = holdings[holder].slot_of(choice.step)
            mine = holdings[rank].slot_of(choice.step)
            if slot is None:
                raise ValueError(f"the copy of rank {holder} has changed")
            sources.append([holder, slot.index, slot.sequence])
            own.append(None if mine is None else mine.index)
            names.append(f"rank{rank}")
            with open(os.path.join(unfinished, names[-1]), "xb") as target:
                index = None if mine is None else mine.index
                files.copy_to(local_rank, target.fileno(), index, with_data=rank == holder)
                os.fsync(target.fileno())
        record = {
            "version": _VERSION,
            "step": choice.step,
            "files": names,
            "sources": sources,
            "own": own,
            "behind": list(choice.behind),
            "kept_by": list(choice.kept_by),
            "replicated": choice.is_replicated,
            "at_death": choice.is_at_death,
        }
        with open(os.path.join(unfinished, _RECORD), "x", encoding="utf-8") as file:
            json.dump(record, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(unfinished)
        os.rename(unfinished, folder)
    except BaseException:
        rmtree(unfinished, ignore_errors=True)
        raise
    _sync(parent)
    return folder


def newest(parent: str) -> Saved | None:
    """Return the newest training state that is saved in the folder of ``--keep-save``; ``None`` without one.

    Raises:
        OSError: the folder or its files cannot be read.
        ValueError: the newest saved state is damaged.
    """
    try:
        number = max(_numbers(parent), default=None)
    except FileNotFoundError:
        return None
    return None if number is None else load(os.path.join(parent, f"{_PREFIX}{number:06d}"))


def load(folder: str) -> Saved:
    """Read one saved training state from its folder. Raises the errors of :func:`newest`."""
    with open(os.path.join(folder, _RECORD), encoding="utf-8") as file:
        record: dict[str, Any] = json.load(file)
    try:
        if record["version"] != _VERSION:
            raise ValueError(f"{folder} has the unknown version {record['version']}")
        paths = [os.path.abspath(os.path.join(folder, os.path.basename(name))) for name in record["files"]]
        saved = Saved(
            folder,
            int(record["step"]),
            tuple(f"{_mark(path)}:{path}" for path in paths),
            tuple((int(rank), int(slot), int(sequence)) for rank, slot, sequence in record["sources"]),
            tuple(None if slot is None else int(slot) for slot in record["own"]),
            tuple(map(int, record["behind"])),
            tuple(map(int, record["kept_by"])),
            bool(record["replicated"]),
            bool(record["at_death"]),
        )
        is_whole = len(paths) == len(saved.sources) == len(saved.own)
        if not is_whole or not all(
            _has_copy(paths[rank], slot, saved.step) for rank, slot, _ in saved.sources
        ):
            raise ValueError(f"{folder} has no complete copy of step {saved.step}")
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{folder} is damaged") from error
    return saved


def _numbers(parent: str) -> list[int]:
    found = (name.removeprefix(_PREFIX) for name in os.listdir(parent) if name.startswith(_PREFIX))
    return [int(each) for each in found if each.isascii() and each.isdecimal()]


def _words(path: str, at: int, count: int) -> tuple[int, ...]:
    with open(path, "rb") as file:
        return layout.unpack(
            os.pread(file.fileno(), layout.WORD * count, at).ljust(layout.WORD * count, b"\0")
        )


def _mark(path: str) -> int:
    magic, mark = _words(path, 0, 2)
    if magic != layout.MAGIC:
        raise ValueError(f"{path} is damaged")
    return mark


def _has_copy(path: str, slot: int, step: int) -> bool:
    table = _words(path, layout.WORD * Head.TABLE, 2 * (1 + layout.SLOTS))
    words = _words(path, table[2 * (1 + slot)] % (1 << 62), Slot.COUNT)
    return words[: Slot.STEP + 1] == (layout.SLOT_MAGIC, SlotState.COMPLETE, step)


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy(source: int, target: int, at: int, length: int) -> None:
    """Copy ``length`` bytes at the offset ``at`` of a file to the same offset of another file. Skip the holes
    of the first file (ranges without data). ``source`` and ``target`` are file descriptors.

    Raises:
        OSError: the target cannot be written.
    """
    end = at + length
    while at < end:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # The rest of the file has no data.
            raise
        if at >= end:
            return
        os.lseek(target, at, os.SEEK_SET)
        done = os.sendfile(target, source, at, min(_CHUNK, end - at))
        if not done:
            return
        at += done
