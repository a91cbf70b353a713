"""The agent's access to its files in memory (memfds) into which its workers copy their training state. The
kernel deletes these files when the agent exits.

There is one file for each local rank. With ``--keep-peers`` there is a second one, into which the worker
downloads the copies that a rank of another node has made. :mod:`elasticrs._engine.inside.keep.layout`
describes the files. The agent does not trust their contents, because workers can write anything into them:
the agent checks each number that it reads, reads nothing beyond the end of a file, and never maps a file into
its memory. Workers do map the files, and therefore forbid (by a seal) that a file becomes shorter.
"""

from __future__ import annotations

import errno
import os
import time

from elasticrs._engine.inside.keep import layout
from elasticrs._engine.inside.keep.layout import Agreed, Head, Mode, Slot, SlotState
from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import TypeAlias

    from elasticrs._engine.inside.keep.choice import Choice, Holding, KeptSlot
    from elasticrs._engine.workers.plan import MemoryFiles

    PlanValue: TypeAlias = "bool | int | float | str | Sequence[PlanValue] | Mapping[str, PlanValue] | None"

MAX_RECORD = 64 << 20
"""Maximum size in bytes of a record of random numbers and the like. The agent ignores longer records."""

_CHUNK = 1 << 20
_CLEARED = (
    (Head.PID, Head.CHECK_DIGEST),
    (Head.RESTORED, Head.SECURED),
    (Head.GIVEN_UP, Head.GIVEN_UP),
    (Head.DAMAGED, Head.DAMAGED),
)
"""First and last index of the words in a file's head that the agent clears before each attempt."""
ALL_STEPS = _MAX_STEP = 1 << 62


class Progress(Value):
    """The last training step that a worker has completed.

    Args:
        counts: what counts the steps. ``keep``: :class:`elasticrs.Keep`, across restarts. ``script``: the
            script, which calls :func:`elasticrs.timer.heartbeat`. ``attempt``: elasticrs, from 0 in each
            attempt; see :mod:`elasticrs._engine.inside.boundary`.
        at_ns: time at which the step ended, in nanoseconds of the monotonic clock; 0 if unknown.
    """

    counts: str
    step: int
    at_ns: int


class KeepFiles:
    """Access to the files in memory into which one agent's workers copy their training state.

    Args:
        memory: the files of this node's ranks. If they have been closed, no state is kept.
        partners: the files for copies of another node's ranks; ``None`` without ``--keep-peers``.

    Raises:
        OSError: the kernel has no memory for the files' first pages.
    """

    def __init__(self, memory: MemoryFiles, partners: MemoryFiles | None = None) -> None:
        self.memory, self.places = memory, memory.places
        self._partner_fds = [] if partners is None else partners.fds
        self._is_used = self._is_marked = False
        for fd in memory.fds:
            os.ftruncate(fd, layout.REGIONS_AT)
        if partners is not None:
            for fd in partners.fds:
                os.ftruncate(fd, layout.REGIONS_AT)
                os.pwrite(fd, layout.pack([layout.MAGIC, partners.mark]), 0)

    @property
    def _fds(self) -> Sequence[int]:
        return self.memory.fds

    def begin(
        self, shared: Mapping[str, PlanValue], own: Mapping[int, Mapping[str, PlanValue]], newest: int | None
    ) -> None:
        """Prepare the workers' files for an attempt: write each worker's plan (what it is to restore), and
        delete the copies of all steps after ``newest``. No worker of an earlier attempt may be running. Also
        erase what the agent and the workers wrote about an agreed step (:class:`.Agreed`), except at the
        first call, when the workers may be running.

        Args:
            shared: the members of the plan that are the same for all workers.
            own: by local rank, the members of the plan that are different for each worker.
            newest: the newest step whose copies are not deleted; ``None`` to delete all copies.

        Raises:
            OSError: a file cannot be written, or a plan is too long.
        """
        begin_of_all, is_used = _json(shared)[:-1], self.is_used()
        for local_rank, members in own.items():
            fd = self._fds[local_rank]
            if is_used:
                self._clear(fd, newest)
            if self._is_marked:
                os.pwrite(fd, bytes(layout.WORD * (Agreed.END - Agreed.NUMBER)), layout.WORD * Agreed.NUMBER)
            end = _json(members)[1:]
            text = (begin_of_all + (", " if shared and members else "") + end).encode()
            if len(text) > layout.MAX_PLAN:
                raise OSError(errno.EMSGSIZE, f"the plan of {len(text)} bytes is too long")
            os.pwrite(fd, layout.pack([len(text)]) + text, layout.PLAN_AT)
        if not self._is_marked:
            # Write the mark (a random number) after the first plan, because a waiting worker reads its plan
            # as soon as it finds the mark in its file.
            for fd in self._fds:
                os.pwrite(fd, layout.pack([layout.MAGIC, self.memory.mark]), 0)
            self._is_marked = True

    def _clear(self, fd: int, newest: int | None) -> None:
        for first, last in _CLEARED:
            os.pwrite(fd, bytes(layout.WORD * (last + 1 - first)), layout.WORD * first)
        for _, at, words in self._slots(fd, self._head(fd)):
            if newest is None or words[Slot.STEP] > newest:
                os.pwrite(fd, layout.pack([SlotState.EMPTY]), at + layout.WORD * Slot.STATE)

    def is_used(self) -> bool:
        """Return true if a worker's program has used ``Keep`` in the current attempt or an earlier one."""
        # A program that starts to use Keep writes its pid last, so without a pid there is nothing to clear.
        self._is_used = self._is_used or any(map(_is_joined, self._fds))
        return self._is_used

    def was_replicated(self, local_rank: int) -> bool:
        """Return true if the ranks of several nodes have found that they all have the same state."""
        return self._word(self._fds[local_rank], Head.WAS_REPLICATED) == 1

    def is_sharded(self, local_rank: int) -> bool:
        """Return true if it is known that each rank has only a part of the state."""
        return self._word(self._fds[local_rank], Head.MODE) == Mode.SHARDED

    def agreed(self) -> Choice | None:
        """Return the step on which the workers of several nodes have agreed. The first worker of this node
        writes it into its file. Return ``None`` if it has not done so yet, or has written something else.
        """
        if not self._fds:
            return None
        fd = self._fds[0]
        if self._word(fd, Head.IS_AGREED) != 1:
            return None
        import json

        from elasticrs._engine.inside.keep.choice import Choice

        data = os.pread(fd, layout.REGIONS_AT - layout.PLAN_AT, layout.PLAN_AT)
        length = layout.unpack(data[: layout.WORD])[0]
        try:
            return Choice.of_facts(json.loads(data[layout.WORD : layout.WORD + length])["agreed"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None

    def has_joined(self, local_rank: int) -> bool:
        """Return true if the program of this worker has used ``Keep`` in the current attempt."""
        return bool(self._fds) and _is_joined(self._fds[local_rank])

    def standing(self) -> dict[str, int | float | str | None] | None:
        """Return what the workers have kept so far, for the status page; ``None`` if no worker uses ``Keep``.
        The counters begin anew in each attempt.
        """
        heads = [(fd, self._head(fd)) for fd in self._fds if _is_joined(fd)]
        if not heads:
            return None
        slots = [words for fd, head in heads for _, _, words in self._slots(fd, head)]
        newest = max(slots, key=lambda words: words[Slot.STEP], default=None)
        ended = [step for _, head in heads if (step := _step(head[Head.ENDED])) is not None]
        return {
            "tier": "memory",
            "step": None if newest is None else newest[Slot.STEP],
            "age_seconds": None if newest is None else max(0.0, time.time() - newest[Slot.WALL_NS] / 1e9),
            "ended_step": max(ended, default=None),
            "secured_step": _step(min(head[Head.SECURED] for _, head in heads)),
            "bytes": sum(512 * os.fstat(fd).st_blocks for fd in (*self._fds, *self._partner_fds)),
            "copies": sum(head[Head.COPIES] for _, head in heads),
            "failed_copies": sum(head[Head.FAILED_COPIES] for _, head in heads),
            "blocked_seconds": sum(head[Head.BLOCKED_NS] for _, head in heads) / 1e9,
        }

    def progress(self, local_rank: int) -> Progress | None:
        """Return the last step that a worker has written into its file; ``None`` if there is none."""
        if not self._fds:
            return None
        head = self._head(self._fds[local_rank])
        if head[Head.PID]:
            ended = _step(head[Head.ENDED])
            step = _step(head[Head.RESTORED]) if ended is None else ended
            return None if step is None else Progress("keep", step, head[Head.ENDED_AT])
        owner, steps, at_ns, *_ = self.steps_of(local_rank)
        return Progress("attempt", steps, at_ns) if owner and 0 < steps <= _MAX_STEP else None

    def holding(self, local_rank: int, rank: int, world: int) -> Holding:
        """Return which steps a file contains. Call this after all processes of the attempt have exited."""
        from elasticrs._engine.inside.keep.choice import Holding

        fd = self._fds[local_rank]
        head = self._head(fd)
        slots = tuple(
            _kept_slot(index, words)
            for index, _, words in self._slots(fd, head)
            if (words[Slot.RANK], words[Slot.WORLD]) == (rank, world)
        )
        small = frozenset(self._small(fd, head))
        first, stride, count = head[Head.TWINS : Head.TWINS + 3]
        twins = (first, stride, count) if count and stride else None
        damaged = _step(head[Head.DAMAGED])
        if not head[Head.PID]:
            return Holding(slots, small, has_joined=False, damaged=damaged, twins=twins)
        check = _step(head[Head.CHECK_STEP])
        return Holding(
            slots,
            small,
            attempt=head[Head.ATTEMPT],
            ended=_step(head[Head.ENDED]),
            mode=head[Head.MODE],
            check=None if check is None else (check, head[Head.CHECK_DIGEST]),
            restored=_step(head[Head.RESTORED]),
            answer=head[Head.ANSWER],
            off=_text(fd, layout.REASON_AT, min(head[Head.REASON_LENGTH], layout.MAX_REASON)),
            changes=head[Head.CHANGES],
            refused=_step(head[Head.REFUSED]),
            damaged=damaged,
            twins=twins,
        )

    def partner_holdings(self, local_rank: int, world: int) -> dict[int, Holding]:
        """Return which copies a worker has downloaded from ranks of other nodes (``--keep-peers``), by the
        rank that made them. The numbers of the slots (regions of the file) that contain these copies begin at
        :data:`.layout.SLOTS`.
        """
        found: dict[int, Holding] = {}
        for fd in self._partner_fds[local_rank : local_rank + 1]:
            for index, _, words in self._slots(fd, self._head(fd)):
                rank = words[Slot.RANK]
                if words[Slot.WORLD] == world and rank < world:
                    from elasticrs._engine.inside.keep.choice import Holding

                    before = found[rank].slots if rank in found else ()
                    slot = _kept_slot(layout.SLOTS + index, words)
                    found[rank] = Holding((*before, slot), has_joined=False)
        return found

    def steps_of(self, local_rank: int) -> tuple[int, ...]:
        """Return the words that a worker has written about its steps, from :attr:`.Agreed.OWNER` on."""
        count = Agreed.END - Agreed.OWNER
        return _words(self._fds[local_rank], layout.WORD * Agreed.OWNER, count) if self._fds else (0,) * count

    def ask(self, word: int, values: Sequence[int]) -> None:
        """Write words from the index ``word`` on, to ask all workers for a common step (:class:`.Agreed`)."""
        for fd in self._fds:
            os.pwrite(fd, layout.pack(values), layout.WORD * word)

    def copy_to(self, local_rank: int, target: int, slots: Mapping[int, bool]) -> None:
        """Copy a rank's small state (random numbers and the like) and some of its slots (each with a copy of
        its parameters) to the file ``target``. The other slots are empty there. The values of ``slots`` are
        true for those whose tensors are copied, too, and not only their head and index. Raises ``OSError``.
        """
        from elasticrs._engine.inside.keep.saved import copy

        fd = self._fds[local_rank]
        head = self._head(fd)
        os.ftruncate(target, os.fstat(fd).st_size)
        copy(fd, target, 0, layout.PLAN_AT)
        ring, *regions = self._regions(fd, head)
        if ring is not None:
            copy(fd, target, *ring)
        for index, region in enumerate(regions):
            if index not in slots or region is None:
                empty = layout.pack([0, 0])
                os.pwrite(target, empty, layout.WORD * (Head.TABLE + 2 * (1 + index)))
                continue
            at, capacity = region
            data_at = _words(fd, at, Slot.COUNT)[Slot.DATA_AT]
            copy(fd, target, at, capacity if slots[index] else min(capacity, data_at))

    @staticmethod
    def _word(fd: int, index: int) -> int:
        return _words(fd, layout.WORD * index, 1)[0]

    @staticmethod
    def _head(fd: int) -> tuple[int, ...]:
        return _words(fd, 0, Head.COUNT)

    @staticmethod
    def _regions(fd: int, head: tuple[int, ...]) -> list[tuple[int, int] | None]:
        """Return offset and size of the file's three regions: ring, slot 0 and slot 1. ``None`` stands for a
        region that is not within the file.
        """
        size = os.fstat(fd).st_size
        table = head[Head.TABLE : Head.TABLE + 2 * (1 + layout.SLOTS)]
        found = zip(table[::2], table[1::2], strict=True)
        return [
            (at, capacity) if at >= layout.REGIONS_AT and 0 < capacity <= size - at else None
            for at, capacity in found
        ]

    def _slots(self, fd: int, head: tuple[int, ...]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Return number, offset and head of each slot that contains a complete copy."""
        for index, region in enumerate(self._regions(fd, head)[1:]):
            if region is None or region[1] < layout.HEAD_SIZE:
                continue
            at, capacity = region
            words = _words(fd, at, Slot.COUNT)
            is_complete = (words[Slot.MAGIC], words[Slot.STATE]) == (layout.SLOT_MAGIC, SlotState.COMPLETE)
            ends = layout.HEAD_SIZE + words[Slot.INDEX_LENGTH], words[Slot.DATA_AT] + words[Slot.DATA_LENGTH]
            if is_complete and max(ends) <= capacity and words[Slot.STEP] < _MAX_STEP:
                yield index, at, words

    def _small(self, fd: int, head: tuple[int, ...]) -> Iterator[int]:
        """Return the steps for which the ring has a record with a correct checksum."""
        start, capacity = self._regions(fd, head)[0] or (0, 0)

        def read(at: int, size: int) -> bytes:
            return os.pread(fd, size, start + at).ljust(size, b"\0")

        for step, _, at, length, crc in layout.records(read, capacity):
            if step < _MAX_STEP and length <= MAX_RECORD and _crc(fd, start + at, length) == crc:
                yield step


def _kept_slot(index: int, words: tuple[int, ...]) -> KeptSlot:
    from elasticrs._engine.inside.keep.choice import KeptSlot

    return KeptSlot(
        index=index,
        step=words[Slot.STEP],
        attempt=words[Slot.ATTEMPT],
        layout=words[Slot.LAYOUT],
        digest=words[Slot.DIGEST],
        sequence=words[Slot.SEQUENCE],
        why_copied=words[Slot.WHY],
    )


def _is_joined(fd: int) -> bool:
    # This is called for each worker before each restart, so do not decode the word.
    return any(os.pread(fd, layout.WORD, layout.WORD * Head.PID))


def _words(fd: int, at: int, count: int) -> tuple[int, ...]:
    """Read 8-byte numbers from a file. Numbers after the end of the file are returned as 0."""
    size = layout.WORD * count
    return layout.unpack(os.pread(fd, size, at).ljust(size, b"\0"))


def _text(fd: int, at: int, length: int) -> str:
    """Read a worker's text from its file. Replace what is not printable, as workers can write any bytes."""
    return _printable(os.pread(fd, length, at).decode(errors="replace")) if length else ""


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else "?" for each in text)


def _step(word: int) -> int | None:
    return word - 1 if 0 < word <= _MAX_STEP else None


def _crc(fd: int, at: int, length: int) -> int | None:
    """Return the CRC-32 of a part of a file; ``None`` if the file does not contain all of this part."""
    from zlib import crc32

    found = 0
    for start in range(0, length, _CHUNK):
        size = min(_CHUNK, length - start)
        data = os.pread(fd, size, at + start)
        if len(data) != size:
            return None
        found = crc32(data, found)
    return found


def _json(value: PlanValue | Mapping[str, PlanValue]) -> str:
    """Convert a value to JSON. :mod:`json` is not used, because its import would take 3 ms at each start."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return '"' + _printable(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, (bool, int, float)):
        return repr(value).lower()
    if not isinstance(value, dict):
        return f"[{', '.join(map(_json, value))}]"
    return "{" + ", ".join(f"{_json(name)}: {_json(each)}" for name, each in value.items()) + "}"
