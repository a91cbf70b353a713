"""Saves the kept state of a job that ends without success in a folder, for the next job (`--keep-save`).

A saved state is a folder with a copy of each rank's file, in the format of :mod:`.layout`, and a record that
says how they belong together. The agent copies bytes: it reads no tensor.
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
"""Bytes that are copied at a time, so that a stop of the job does not wait for more."""


class Saved(Value):
    """A saved state.

    Args:
        folder: where it is.
        step: the step that had ended.
        places: the file of each rank, as in the variable of the workers.
        sources: rank, slot and sequence number of the copy that each rank restores, by rank.
        own: slot of each rank's file with its own copy of that step, or ``None``.
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
        """Return the choice of an attempt with ``world`` ranks that goes on from here."""
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
        """Return step and places of the copies that together are the whole state: of all ranks, or of one."""
        holders = self.sources[: 1 if self.is_replicated else None]
        copies = [[self.places[rank], slot, sequence] for rank, slot, sequence in holders]
        return {"step": self.step, "copies": copies}

    def plan_of(self, rank: int) -> dict[str, Any]:
        """Return a rank's part of the plan."""
        is_new = rank >= len(self.places)
        holder, slot, sequence = self.sources[0 if is_new else rank]
        place = {"file": self.places[holder], "slot": slot, "rank": holder, "sequence": sequence}
        own = {} if is_new else {"home": self.places[rank], "own": self.own[rank]}
        return {"large": place, "small": False, "own": None, **own}


def save(
    files: Files, choice: Choice, holdings: Mapping[int, Holding], ranks: Mapping[int, int], parent: str
) -> str:
    """Save the chosen step in a new folder. Return the folder.

    Args:
        files: the files of the workers.
        choice: the step, and where each rank would restore it from.
        holdings: what each rank has kept.
        ranks: the rank of each file, by local rank.
        parent: where to make the folder.

    Raises:
        OSError: a file cannot be written. The folder has been removed.
        ValueError: a process of the workers still writes to their files.
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
            # If the state is replicated, one copy of the tensors is enough.
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
    """Return the newest saved state in a folder; ``None`` if there is none.

    Raises:
        OSError: the folder or its files cannot be read.
        ValueError: the newest one is damaged.
    """
    try:
        number = max(_numbers(parent), default=None)
    except FileNotFoundError:
        return None
    return None if number is None else load(os.path.join(parent, f"{_PREFIX}{number:06d}"))


def load(folder: str) -> Saved:
    """Return the state that is saved in a folder. Raises as :func:`newest`."""
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
    """Copy a part of a file to the same place of another one. Leave out what the first one does not have.

    Raises:
        OSError: the other file cannot be written.
    """
    end = at + length
    while at < end:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # There is nothing but a hole.
            raise
        if at >= end:
            return
        os.lseek(target, at, os.SEEK_SET)
        done = os.sendfile(target, source, at, min(_CHUNK, end - at))
        if not done:
            return
        at += done
