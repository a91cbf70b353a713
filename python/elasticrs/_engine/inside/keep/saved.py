"""Saves the training state on a disk when a job fails or is stopped, so that the next job can go on from it
(``--keep-save``).

During a job, each rank copies its state into a file in memory that its agent owns. At the end of the job,
each agent saves the files of its node's ranks in a new folder. This folder is a *part* of the saved state,
because other nodes save the files of their ranks. A file on the disk has the same format as in memory
(:mod:`.layout`), because the agent copies bytes without interpreting tensors. The file ``kept.json`` in the
folder records which training steps each rank's file has. The parts of one state have the same number in their
names. Which step is restored from them is chosen when they are read, by the rules of :mod:`.choice`.
"""

from __future__ import annotations

import errno
import json
import os
import time
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from shutil import rmtree

from elasticrs._engine.inside.keep import layout
from elasticrs._engine.inside.keep.choice import Choice, Holding, choose, is_replicated
from elasticrs._engine.inside.keep.layout import Head, Slot, SlotState
from elasticrs._engine.job import phrases
from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Protocol

    class Files(Protocol):
        """The files of the workers; see :class:`elasticrs._engine.workers.keep_files.KeepFiles`."""

        def copy_to(self, local_rank: int, target: int, slots: Mapping[int, bool]) -> None: ...


_RECORD = "kept.json"
_VERSION = 2
_PREFIX = "kept-"
_UNFINISHED = ".unfinished"
_IN_USE = ".in-use-"
_SUCCEEDED = "succeeded"
_BUSY_LIMIT = 2.0
"""Maximum seconds for which a job waits for the end of another job that uses the folder of --keep-save."""

_TOGETHER = 600.0
"""Maximum seconds between the times at which two nodes of a job save their parts of the same state."""

_PAUSE = 0.05

_CHUNK = 1 << 24
"""Bytes that one system call copies. There are not more, because a stop of the job waits for the call."""


class Saved(Value):
    """A training state that a job has saved on a disk.

    Args:
        name: path of the folder with the state. If several nodes have saved a folder each, the common
            beginning of their paths and ``.*``.
        saved: the training step of the state, and what else is known about it. It applies to a job with as
            many ranks as have saved the state.
        places: for each rank, the saved file with its copies, as ``{mark}:{path}`` (see :mod:`.layout`).
        own: for each rank that has itself copied this step, the slot with this copy in its file.
        has_succeeded: true if a job that used the folder has succeeded since the state was saved.
    """

    name: str
    saved: Choice
    places: Mapping[int, str]
    own: Mapping[int, int]
    has_succeeded: bool

    @property
    def step(self) -> int:
        assert self.saved.step is not None
        return self.saved.step

    def choice(self, world: int, ended: int = 0) -> Choice:
        """Return the choice to restore this saved state in an attempt with ``world`` ranks. If each rank
        saved only its part, and the number of ranks has changed, return the reason why it cannot be restored.
        ``ended``: the last step that an earlier attempt of this job completed. The steps between the saved
        one and this one are lost.
        """
        old = self.saved.ranks
        if world != old and not self.saved.is_replicated:
            why = f"{old} ranks saved step {self.step}, now there are {world}, and each saved only its part"
            return Choice(ranks=old, why=f"{why} in {self.name}", readable=self.step)
        behind = (*(rank for rank in self.saved.behind if rank < world), *range(old, world))
        lost = max(self.saved.lost, ended - self.step)
        return self.saved.replaced(behind=behind, lost=lost, why="", folder=self.name)

    def plan_of(self, rank: int) -> dict[str, Any]:
        """Return the part of the agent's plan (what a worker is to restore) that differs between ranks."""
        own = {"home": self.places[rank], "own": self.own.get(rank)} if rank in self.places else {}
        return {"large": self.saved.plan_of(rank, self.places), "own": None, **own}


def save(
    files: Files,
    holdings: Mapping[int, Holding],
    ranks: Mapping[int, int],
    parent: str,
    *,
    world: int,
    was_replicated: bool = False,
    step: int | None = None,
    job: str = "",
    node: str = "",
) -> str:
    """Save the training states of this node's ranks in a new folder. Return the path of the folder.

    Args:
        files: the files in memory into which the workers have copied their states.
        holdings: for each rank of this node, which training steps its file contains.
        ranks: global rank of each worker, by local rank.
        parent: the folder of ``--keep-save``, in which the new folder is made.
        world: number of ranks of the job.
        was_replicated: true if all ranks of the job are known to have the same state.
        step: the step whose copies are saved. ``None`` to save the copies of all steps, because on several
            nodes the step is chosen later, from the copies of all of them.
        job: name of the job.
        node: name of this node, which distinguishes its folder from those of the job's other nodes; empty if
            the job has only one node.

    Raises:
        OSError: a file cannot be written. The new folder is removed before this is raised.
        ValueError: no rank of this node has made a copy that could be saved.
    """
    saved = {
        rank: holding.replaced(slots=tuple(each for each in holding.slots if step in (None, each.step)))
        for rank, holding in holdings.items()
    }
    if not any(holding.slots for holding in saved.values()):
        raise ValueError("no copy of the state is in memory")
    has_equal_ranks = is_replicated(saved, was_replicated)
    os.makedirs(parent, exist_ok=True)
    folder = _new_folder(parent, job, node)
    unfinished = f"{folder}.{os.getpid()}{_UNFINISHED}"
    record: dict[str, Any] = {"version": _VERSION, "job": job, "time": time.time(), "world": world}
    record["attempt"] = max(holding.attempt for holding in holdings.values())
    record |= {"was_replicated": was_replicated, "ranks": {}}
    os.mkdir(unfinished, 0o700)
    try:
        done: set[int] = set()
        for local_rank, rank in sorted(ranks.items(), key=lambda pair: pair[1]):
            # If all ranks have the same state, it is enough to save the tensors of one rank.
            slots = {
                slot.index: not has_equal_ranks or slot.step not in done
                for slot in saved[rank].slots
                if saved[rank].slot_of(slot.step) == slot
            }
            done |= {slot.step for slot in saved[rank].slots}
            with open(os.path.join(unfinished, f"rank{rank}"), "xb") as target:
                files.copy_to(local_rank, target.fileno(), slots)
                os.fsync(target.fileno())
            whole = [index for index, has_data in slots.items() if has_data]
            record["ranks"][rank] = {"holding": saved[rank].to_json(), "whole": whole}
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


def _new_folder(parent: str, job: str, node: str) -> str:
    """Return the path of the folder for this node's part of a saved state. If the newest state in ``parent``
    has been saved by the same job just now, and this node's part of it is missing, the path has the number of
    that state, and otherwise the next number.
    """
    number = max(_numbers(parent), default=0)
    others = _parts(parent, number)
    names = {os.path.basename(each).partition(".")[2] for each in others}
    if not node or node in names or not all(_is_of_job(each, job) for each in others) or not others:
        number += 1
    return os.path.join(parent, f"{_PREFIX}{number:06d}{'.' * bool(node)}{node}")


def _is_of_job(part: str, job: str) -> bool:
    try:
        record = _record(part)
        return bool(record["job"] == job) and abs(time.time() - record["time"]) < _TOGETHER
    except (OSError, ValueError, KeyError, TypeError):
        return False


def claim(parent: str, job: str) -> int:
    """Mark the folder of ``--keep-save`` as used by a job. The mark is a file that all agents of the job lock
    (``flock``). The kernel unlocks it when they end, also if they are killed. On a file system without locks,
    the mark has no effect.

    Returns:
        Descriptor of the locked file, for :func:`release`.

    Raises:
        BlockingIOError: another job uses the folder. The text says which.
        OSError: the folder cannot be written.
    """
    os.makedirs(parent, exist_ok=True)
    path, give_up_at = _mark_of(parent, job), time.monotonic() + _BUSY_LIMIT
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Another job may have deleted the file before it was locked here, because an unlocked file of this
        # kind looks like that of a job that has ended.
        is_own = _lock(descriptor, LOCK_SH) and _is_at(descriptor, path)
        others = [
            name.removeprefix(_IN_USE)
            for name in os.listdir(parent)
            if name.startswith(_IN_USE) and os.path.join(parent, name) != path and _is_locked(parent, name)
        ]
        if is_own and not others:
            return descriptor
        os.close(descriptor)
        if time.monotonic() > give_up_at:
            other = bytes.fromhex(others[0]).decode(errors="replace") if others else job
            raise BlockingIOError(errno.EWOULDBLOCK, f"the job {other} uses it")
        time.sleep(_PAUSE)


def release(parent: str, job: str, descriptor: int, *, has_succeeded: bool) -> None:
    """Delete the file with which :func:`claim` has marked the folder as in use, unless another agent of the
    job still uses the folder. If the job ``has_succeeded``, record this in the newest saved state.
    """
    try:
        for part in _parts(parent, max(_numbers(parent), default=0)) if has_succeeded else ():
            os.close(os.open(os.path.join(part, _SUCCEEDED), os.O_WRONLY | os.O_CREAT, 0o600))
        if _lock(descriptor, LOCK_EX):
            os.unlink(_mark_of(parent, job))
    except OSError:
        return  # The next job in this folder deletes the file, because it is not locked.
    finally:
        os.close(descriptor)


def _mark_of(parent: str, job: str) -> str:
    return os.path.join(parent, _IN_USE + job.encode()[:100].hex())


def _lock(descriptor: int, kind: int) -> bool:
    """Lock an open file without waiting. Return false if another process has a lock that conflicts."""
    try:
        flock(descriptor, kind | LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # The file system has no locks, so go on as if the file were locked.
    return True


def _is_locked(parent: str, name: str) -> bool:
    """Return true if agents of another job still lock the file ``name``, with which that job has marked the
    folder as used. If none does, the job has ended: delete the file.
    """
    path = os.path.join(parent, name)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        is_abandoned = _lock(descriptor, LOCK_EX)
        if is_abandoned and _is_at(descriptor, path):
            os.unlink(path)
    finally:
        os.close(descriptor)
    return not is_abandoned


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def newest(*parents: str) -> Saved | None:
    """Return the newest training state that a job has saved (``--keep-save``); ``None`` if none is saved. If
    each node has saved its part on its own disk, ``parents`` are the folders of all nodes.

    Raises:
        OSError: a folder or a file in it cannot be read.
        ValueError: the newest saved state is damaged, or the part of it that a node has saved is missing.
    """
    found = []
    for parent in parents:
        try:
            numbers = _numbers(parent)
        except FileNotFoundError:
            numbers = []
        if numbers:
            found.append(_parts(parent, max(numbers)))
    return _merged([part for parts in found for part in parts]) if found else None


def _merged(parts: Sequence[str]) -> Saved:
    """Return the state that is saved in ``parts``, the nodes' folders. Raise the errors of :func:`newest`."""
    try:
        return _chosen(parts)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{', '.join(parts)}: a record is damaged ({error!r})") from error


def _chosen(parts: Sequence[str]) -> Saved:
    name = parts[0] if len(parts) == 1 else f"{parts[0].partition('.')[0]}.*"
    holdings: dict[int, Holding] = {}
    places: dict[int, str] = {}
    whole: dict[int, list[int]] = {}
    records = {part: _record(part) for part in parts}
    last = max(record["attempt"] for record in records.values())
    # A node that has left the job before its end has saved what it had in an earlier attempt. If the number
    # of ranks was another one then, ignore this part.
    worlds = {record["world"] for record in records.values() if record["attempt"] == last}
    world, was_replicated = worlds.pop(), False
    for part, record in records.items():
        if record["world"] != world:
            continue
        was_replicated |= bool(record["was_replicated"])
        for number, each in record["ranks"].items():
            rank, holding = int(number), Holding.of_json(each["holding"])
            if rank not in holdings or holdings[rank].attempt < holding.attempt:
                path = os.path.abspath(os.path.join(part, f"rank{rank}"))
                holdings[rank], places[rank] = holding, f"{_mark(path)}:{path}"
                whole[rank] = list(map(int, each["whole"]))
    if worlds or len({record["job"] for record in records.values()}) > 1:
        raise ValueError(f"{', '.join(parts)} are parts of different jobs")
    missing = [rank for rank in range(world) if rank not in holdings]
    choice = choose(holdings, world, was_replicated=was_replicated)
    if missing and choice.step is None:
        where = (
            "the folder of another node has it" if len(missing) == 1 else "folders of other nodes have them"
        )
        raise ValueError(f"{name} lacks the state of {phrases.ranks_text(missing, 8)}; {where}")
    if choice.step is None:
        raise ValueError(f"{name} has no complete copy of a step: {choice.why}")
    slots = {rank: slot for rank, each in holdings.items() if (slot := each.slot_of(choice.step)) is not None}
    own = {rank: slot.index for rank, slot in slots.items()}
    sources = {
        rank: (holder, slot, sequence)
        for rank, (holder, slot, sequence) in choice.sources.items()
        if slot in whole[holder] and _has_copy(places[holder], slot, choice.step)
    }
    needed = range(1 if choice.is_replicated else world)
    if len(sources) < len(needed):
        raise ValueError(f"{name} has no complete copy of step {choice.step}")
    has_succeeded = any(os.path.exists(os.path.join(part, _SUCCEEDED)) for part in parts)
    return Saved(name, choice.replaced(ranks=world, sources=sources), places, own, has_succeeded)


def _record(part: str) -> dict[str, Any]:
    with open(os.path.join(part, _RECORD), encoding="utf-8") as file:
        record: dict[str, Any] = json.load(file)
    if record["version"] != _VERSION:
        raise ValueError(f"{part} has the unknown version {record['version']}")
    return record


def _parts(parent: str, number: int) -> list[str]:
    return [os.path.join(parent, name) for name in sorted(os.listdir(parent)) if _number(name) == number]


def _number(name: str) -> int | None:
    digits = name.removeprefix(_PREFIX).partition(".")[0]
    is_one = name.startswith(_PREFIX) and not name.endswith(_UNFINISHED)
    return int(digits) if is_one and digits.isascii() and digits.isdecimal() else None


def _numbers(parent: str) -> list[int]:
    return [number for name in os.listdir(parent) if (number := _number(name)) is not None]


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


def _has_copy(place: str, slot: int, step: int) -> bool:
    path = place.partition(":")[2]
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
