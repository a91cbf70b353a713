"""Access to the in-memory file into which a worker copies its training state, in the format of
:mod:`.layout`. Also prints messages about these copies for the user.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import sys
import zlib
from fcntl import F_ADD_SEALS, F_SEAL_SHRINK, fcntl
from functools import cached_property
from mmap import ACCESS_COPY, MADV_REMOVE, mmap
from time import monotonic, sleep, time_ns

from elasticrs._engine.inside.keep import layout
from elasticrs._engine.inside.keep.layout import Head, Slot, SlotState
from elasticrs._engine.job import phrases

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

_CHUNK = 1 << 25
"""Number of bytes to give back to the kernel in one call. More would hold the GIL for too long."""


_OF_LAUNCHER = {
    "RANK": "rank",
    "WORLD_SIZE": "world",
    "LOCAL_WORLD_SIZE": "local_world",
    "TORCHELASTIC_RUN_ID": "run_id",
}
"""Variables that each launcher sets for its workers, and the names of the same values in the agent's plan."""

_PATIENCE, _PAUSE = 60.0, 0.001
"""Maximum seconds for which a worker waits for the first plan, and seconds between two looks for it."""


_has_time = False
"""True if the lines on standard error begin with the time, as those of the agent do."""


def say(text: str) -> None:
    """Write a line about this rank to standard error, for the user. If another rank of this node has written
    the same text in this attempt, write nothing.
    """
    if _is_first_to_say(text):
        _write(f"rank {os.environ.get('RANK', '?')}: {text}")


def say_for_all(text: str, number: str = "RANK") -> None:
    """Write a line about all ranks of the job to standard error, for the user. Only rank 0 writes it. If
    ``number`` is ``"LOCAL_RANK"``, the line is about all ranks of this node.
    """
    if os.environ.get(number, "0") == "0":
        _write(text)


def _write(text: str) -> None:
    try:
        print(f"{phrases.prefix(time_ns() if _has_time else None)}keep: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return  # The program has closed its standard error.


def _is_first_to_say(text: str) -> bool:
    """Return true if no process of this node has called this with the same text in this attempt."""
    mark = os.environ.get(layout.VARIABLE, "").partition(":")[0]
    key = f"{mark} {os.environ.get('ELASTICRS_ROUND')} {text}"
    try:
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    except OSError:
        return True  # No file descriptor is free.
    with name:
        try:
            # Only one process can have this name. It has the name until it exits.
            name.bind(f"\0elasticrs-keep-{zlib.crc32(key.encode()):08x}")
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        name.detach()
    return True


class OffError(Exception):
    """Raised if ``Keep`` cannot work. The text is the reason for the user, without a full stop."""


class UnusableError(RuntimeError):
    """Raised if this rank cannot use its file, but other ranks may restore a step. The agent recognizes this
    failure by the name of the class, :data:`.layout.UNUSABLE`.
    """


class DamagedCopyError(RuntimeError):
    """Raised if the copy that this rank was to restore is damaged, but other ranks may restore theirs. The
    restart policy recognizes this failure by the name of the class (``DAMAGED`` in ``restart_policy.py``).
    """


class ForeignError(OffError):
    """Raised if the agent's file is for the state of another process, or of another ``Keep`` object."""


class KeepFile:
    """The file with copies of a rank's training state: of this rank, or of a rank whose copy it restores.

    Args:
        where: ``{mark}:{path}``, as in the variable :data:`.layout.VARIABLE`.

    Raises:
        OffError: there is no such file, or it belongs to another agent.
    """

    def __init__(self, where: str) -> None:
        self.place = where
        mark, _, self._path = where.partition(":")
        self._mark = int(mark) if mark.isdigit() else -1
        descriptor = self._open()
        try:
            # If the file became shorter than its mapping, an access would end the process.
            # A file on a disk cannot be sealed.
            if os.fstat(descriptor).st_nlink == 0:
                fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK)
            self._head = mmap(descriptor, layout.HEAD_SIZE)
        finally:
            os.close(descriptor)
        self.words = memoryview(self._head).cast("Q")

    @cached_property
    def ring(self) -> Ring:
        """The latest records of the rank's random numbers and the like."""
        return Ring(self)

    @cached_property
    def slots(self) -> list[SlotRegion]:
        """The slots, each of which can hold one copy of parameters and optimizer state."""
        return [SlotRegion(self, number) for number in range(layout.SLOTS)]

    def close(self) -> None:
        """Unmap the file. This object must not be used afterwards."""
        self.words.release()
        self._head.close()
        used = vars(self)
        for region in (*used.pop("slots", ()), *([used.pop("ring")] if "ring" in used else ())):
            region.close()

    def _open(self) -> int:
        # Open the file each time, because the program may close descriptors that it does not know.
        give_up_at = monotonic() + _PATIENCE
        while True:
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise OffError(f"the agent's memory cannot be opened ({error.strerror})") from error
            head, found = os.pread(descriptor, 2 * layout.WORD, 0), os.fstat(descriptor)
            if layout.is_prepared(head, found.st_size, self._mark):
                return descriptor
            os.close(descriptor)
            # If the head is empty, wait: the agent writes it after the first plan, while the workers start.
            if any(head) or found.st_nlink:
                raise OffError("the agent's memory is not visible in this container")
            if monotonic() > give_up_at:
                raise OffError(f"the agent did not prepare its memory within {_PATIENCE:.0f} s")
            sleep(_PAUSE)

    def plan(self) -> dict[str, Any]:
        """Return the agent's plan, which says what this rank is to restore in this attempt. After this call,
        messages to the user have the format that the plan specifies.

        Raises:
            ForeignError: another launcher has started this process. This happens if a worker of the agent is
                itself a launcher, such as torchrun, because its own workers inherit the environment variable
                that names the file.
            OffError: the plan is damaged.
        """
        descriptor = self._open()
        try:
            data = os.pread(descriptor, layout.REGIONS_AT - layout.PLAN_AT, layout.PLAN_AT)
        finally:
            os.close(descriptor)
        length = layout.unpack(data[: layout.WORD])[0]
        try:
            plan: dict[str, Any] = json.loads(data[layout.WORD : layout.WORD + length])
        except ValueError as error:
            raise OffError("the agent's plan is damaged") from error
        for name, key in _OF_LAUNCHER.items():
            value = plan[key]
            if (found := os.environ.get(name, value)) != value:
                raise ForeignError(
                    f"another launcher has started this process ({name} is {found}, and elasticrun had set it"
                    f" to {value}); start this program with elasticrun to keep its state"
                )
        global _has_time  # noqa: PLW0603 -- one for each process
        _has_time = plan["has_time"]
        return plan

    def tell_agreed(self, plan: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Write the step on which the nodes agreed, and ``facts`` about it, into the plan for the agent."""
        text = json.dumps({**plan, "agreed": facts}).encode()
        if len(text) > layout.MAX_PLAN:
            return  # The agent cannot tell the user about the step then. But rank 0 does so.
        descriptor = self._open()
        try:
            os.pwrite(descriptor, layout.pack([len(text)]) + text, layout.PLAN_AT)
        finally:
            os.close(descriptor)
        self.words[Head.IS_AGREED] = 1

    def join(self, rank: int, world: int, attempt: int, mode: int) -> None:
        """Record in the file that this process copies its state into it.

        Raises:
            ForeignError: another process of the same rank has already done so in this attempt. So the copies
                in the file are those of that process.
        """
        owner, own = self.words[Head.PID], os.getpid()
        if owner not in (0, own):
            raise ForeignError(f"process {owner} of this rank has kept its state in this attempt already")
        counters = (range(Head.RANK, Head.TABLE), range(Head.RESTORED, Head.IS_AGREED))
        for word in itertools.chain(*counters, (Head.SECURED, Head.GIVEN_UP)):
            self.words[word] = 0
        self.words[Head.RANK], self.words[Head.WORLD] = rank + 1, world
        self.words[Head.MODE], self.words[Head.ATTEMPT] = mode, attempt
        self.words[Head.PID] = own

    def tell(self, reason: str) -> None:
        """Record in the file, for the agent, why this rank stopped copying its state or could not load it."""
        text = reason.encode(errors="replace")[: layout.MAX_REASON]
        self._head[layout.REASON_AT : layout.REASON_AT + len(text)] = text
        self.words[Head.REASON_LENGTH] = len(text)

    def drop_from(self, step: int) -> None:
        """Delete the copies of ``step`` and of later steps, and the records of later steps. They are from an
        earlier attempt, and the current attempt has not restored them.
        """
        self.ring.drop_after(step)
        for slot in self.slots:
            if slot.complete_step is not None and slot.complete_step >= step:
                slot.drop()

    def copied_steps(self) -> set[int]:
        """Return the steps of which the file now has a complete copy. Read the file again each time, because
        another process may be writing it.
        """
        descriptor = self._open()
        found: set[int] = set()
        try:
            for number in range(1, 1 + layout.SLOTS):
                offset = self.words[Head.TABLE + 2 * number]
                is_in_use = self.words[Head.TABLE + 2 * number + 1] and offset >> 62 == 0
                head = os.pread(descriptor, layout.WORD * (Slot.STEP + 1), offset) if is_in_use else b""
                words = layout.unpack(head)
                if words[: Slot.STEP] == (layout.SLOT_MAGIC, SlotState.COMPLETE):
                    found.update(words[Slot.STEP :])
        finally:
            os.close(descriptor)
        return found

    def region(self, number: int) -> tuple[int, int]:
        """Return offset and size of a region: the ring (``number`` is 0) or a slot (1 or 2). Return zeros if
        the region is empty or not within the file.
        """
        offset, capacity = self.words[Head.TABLE + 2 * number : Head.TABLE + 2 * number + 2]
        descriptor = self._open()
        size = os.fstat(descriptor).st_size
        os.close(descriptor)
        fits = layout.REGIONS_AT <= offset <= size and capacity <= size - offset and not offset % layout.PAGE
        return (offset, capacity) if fits else (0, 0)

    def map(self, number: int, *, is_private: bool = False) -> mmap | None:
        """Map a region into memory; ``None`` if the region is empty. If the mapping is private, this process
        can change it without changing the file.
        """
        offset, capacity = self.region(number)
        if not capacity:
            return None
        descriptor = self._open()
        try:
            if is_private:
                return mmap(descriptor, capacity, offset=offset, access=ACCESS_COPY)
            return mmap(descriptor, capacity, offset=offset)
        finally:
            os.close(descriptor)

    def replace(self, number: int, old: mmap | None, capacity: int) -> mmap:
        """Move a region to the end of the file, with another size. Its content is lost, and its old memory is
        given back to the kernel.

        Raises:
            OSError: there is not enough memory.
        """
        word = Head.TABLE + 2 * number
        self.words[word + 1] = 0  # Other processes now regard the region as empty.
        if old is not None:
            for start in range(0, len(old), _CHUNK):
                old.madvise(MADV_REMOVE, start, min(_CHUNK, len(old) - start))
        capacity = round_up(capacity, layout.PAGE)
        descriptor = self._open()
        try:
            offset = round_up(os.fstat(descriptor).st_size, layout.PAGE)
            # Without this, a lack of memory would end the process with SIGBUS at the first write.
            os.posix_fallocate(descriptor, offset, capacity)
            made = mmap(descriptor, capacity, offset=offset)
        finally:
            os.close(descriptor)
        self.words[word] = offset
        self.words[word + 1] = capacity
        return made


class Ring:
    """The latest records of a rank's random numbers, data loader and the like. A record that was not
    completely written is recognized by its wrong checksum.
    """

    def __init__(self, file: KeepFile) -> None:
        self._file, self._map = file, file.map(0)

    def put(self, step: int, is_end: bool, data: bytes, *, place: int | None = None) -> None:
        """Write a record of a step. ``is_end`` is false if the optimizer of this step has not run yet. With
        ``place`` (:data:`.layout.RESTORED` or :data:`.layout.COPIED`), the record stays there until the next
        one with the same place.

        Raises:
            OSError: there is not enough memory.
        """
        need = layout.RECORD_HEAD + len(data)
        if self._map is None or need > layout.record_size(len(self._map)):
            self._enlarge(need)
        assert self._map is not None
        at = layout.record_at(layout.record_number(step, is_end) if place is None else place, len(self._map))
        start = at + layout.RECORD_HEAD
        self._map[at:start] = bytes(layout.RECORD_HEAD)
        self._map[start : at + need] = data
        self._map[at:start] = layout.pack([step + 1, len(data), zlib.crc32(data)])

    def _enlarge(self, need: int) -> None:
        kept = [*self._intact()]
        self._map = self._file.replace(0, self._map, layout.RECORDS * round_up(need + need // 2, layout.PAGE))
        for step, is_end, number, data in kept:
            self.put(step, is_end, data, place=number)

    def records(self) -> dict[tuple[int, bool], bytes]:
        """Return the records with a correct checksum, by step and ``is_end``."""
        return {(step, is_end): data for step, is_end, _, data in self._intact()}

    def _intact(self) -> Iterator[tuple[int, bool, int, bytes]]:
        """Yield the records with a correct checksum: step, ``is_end``, position in the ring, and content."""
        if (ring := self._map) is None:
            return
        for step, is_end, at, length, crc in layout.records(lambda at, size: ring[at : at + size], len(ring)):
            data = ring[at : at + length]
            if zlib.crc32(data) == crc:
                yield step, is_end, at // layout.record_size(len(ring)), data

    def drop_after(self, step: int) -> None:
        """Delete the records of all steps after ``step``. If it is -1, delete all records."""
        for found, _, number, _ in self._intact():
            if found > step and self._map is not None:
                at = layout.record_at(number, len(self._map))
                self._map[at : at + layout.WORD] = bytes(layout.WORD)

    def close(self) -> None:
        """Unmap the region."""
        if self._map is not None:
            self._map.close()
            self._map = None


class SlotRegion:
    """A region of the file for one copy of parameters and optimizer state. It has a head, an index that names
    the tensors, and the data of the tensors.
    """

    def __init__(self, file: KeepFile, number: int) -> None:
        self._file, self._number = file, number + 1
        self.map = file.map(self._number)
        self.words = None if self.map is None else _words(self.map)

    @property
    def capacity(self) -> int:
        """Size of the slot in bytes."""
        return 0 if self.map is None else len(self.map)

    @property
    def complete_step(self) -> int | None:
        """Step of the copy in this slot; ``None`` if the slot has no complete copy."""
        words = self.words
        if words is None or words[Slot.MAGIC] != layout.SLOT_MAGIC:
            return None
        return words[Slot.STEP] if words[Slot.STATE] == SlotState.COMPLETE else None

    @property
    def sequence(self) -> int:
        """Number of the copy in this slot among all copies of the file; 0 if the slot has no copy."""
        return 0 if self.words is None or self.complete_step is None else self.words[Slot.SEQUENCE]

    def reserve(self, capacity: int) -> bool:
        """Enlarge the slot to at least ``capacity`` bytes. Return true if that was necessary. The content of
        the slot is then lost, and all its bytes are zero.

        Raises:
            OSError: there is not enough memory.
        """
        if capacity <= self.capacity:
            return False
        old, self.map, self.words = self.map, None, None
        self.map = self._file.replace(self._number, old, capacity)
        self.words = _words(self.map)
        return True

    def begin(self, index: bytes, data_at: int, facts: dict[int, int]) -> None:
        """Begin to write a copy into the slot. Readers ignore it until :meth:`complete` is called."""
        assert self.words is not None
        assert self.map is not None
        words = self.words
        words[Slot.STATE] = SlotState.WRITING
        words[Slot.MAGIC] = layout.SLOT_MAGIC
        for word, value in facts.items():
            words[word] = value
        words[Slot.INDEX_LENGTH], words[Slot.DATA_AT] = len(index), data_at
        self.map[layout.HEAD_SIZE : layout.HEAD_SIZE + len(index)] = index

    def complete(self, digest: int, sequence: int) -> None:
        """Mark the copy in the slot as complete, so that readers use it."""
        assert self.words is not None
        words = self.words
        words[Slot.DIGEST], words[Slot.SEQUENCE], words[Slot.WALL_NS] = digest, sequence, time_ns()
        words[Slot.STATE] = SlotState.COMPLETE

    def drop(self) -> None:
        """Mark the slot as empty, but do not free its memory."""
        if self.words is not None:
            self.words[Slot.STATE] = SlotState.EMPTY

    def close(self) -> None:
        """Unmap the slot."""
        if self.words is not None and self.map is not None:
            self.words.release()
            self.map.close()
        self.map = self.words = None

    def read_only(self) -> tuple[mmap, tuple[int, ...], bytes]:
        """Map the slot so that changes stay in this process. Return the mapping, the words of its head,
        and the index that names the tensors.

        Raises:
            ValueError: the lengths in the head are larger than the slot.
        """
        private = self._file.map(self._number, is_private=True)
        if private is None:
            raise ValueError("the slot is empty")
        words = layout.unpack(private[: Slot.COUNT * layout.WORD])
        index_end = layout.HEAD_SIZE + words[Slot.INDEX_LENGTH]
        data_at, length = words[Slot.DATA_AT], words[Slot.DATA_LENGTH]
        if not index_end <= data_at <= len(private) or length > len(private) - data_at or data_at % 64:
            raise ValueError("the lengths in the slot do not fit")
        return private, words, private[layout.HEAD_SIZE : index_end]


def _words(region: mmap) -> memoryview:
    with memoryview(region) as whole, whole[: layout.HEAD_SIZE] as head:
        return head.cast("Q")


def round_up(number: int, to: int) -> int:
    """Return the next multiple of ``to``."""
    return -(-number // to) * to


def sizes_as_text(need: int, allowed: int) -> tuple[str, str]:
    """Return two sizes as texts for the user: the memory that is needed, rounded up, and the memory that is
    allowed, rounded down. Both texts are in MiB if both sizes are at least one MiB, and in bytes otherwise.
    """
    unit, size = ("MiB", 1 << 20) if min(need, allowed) >> 20 else ("bytes", 1)
    return f"{-(-need // size)} {unit}", f"{max(0, allowed) // size} {unit}"
