"""Encodes the evidence about one node's ranks, for other nodes, as compressed JSON that shares equal values.

- **NODE-1** An encoding never exceeds the requested number of bytes. If necessary, the earliest collectives
  and the outermost stack frames are left out.
- **NODE-2** For any input, :func:`decode` returns only facts whose fields have the declared types.
  :data:`MAX_DECODED` and :data:`MAX_STEPS` limit its time and memory.
"""

from __future__ import annotations

import json
import zlib
from itertools import groupby

from elasticrs._engine.hangs.flight_record import (
    MAX_NUMBER,
    Call,
    GroupSteps,
    NoRecord,
    RankFacts,
    RankRecord,
    Step,
    Transfer,
    number,
    of_type,
)
from elasticrs._engine.hangs.stacks import Frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TypeVar

    _T = TypeVar("_T")

VERSION = 2
MAX_DECODED = 4 << 20
"""Maximum size of the decoded JSON in bytes, and maximum number of ranks in all lists of group members."""

MAX_STEPS = 100_000
"""Maximum total number of collectives in one encoding."""

MAX_FRAMES = 48
"""Maximum number of frames to encode per stack. The innermost frames are kept."""

_FEWEST_FRAMES = 12
_COMPLETE, _STARTED = 1, 2


def encode(facts: Sequence[RankFacts], *, max_bytes: int, max_steps: int) -> bytes | None:
    """Encode what one node knows about its ranks' collectives. Return ``None`` if it does not fit into
    ``max_bytes`` or :data:`MAX_DECODED`. Of more than ``max_steps`` collectives of a rank in a group, keep
    the latest ones and the first incomplete one.
    """
    while True:
        steps, frames = max(1, max_steps), MAX_FRAMES if max_steps > 1 else _FEWEST_FRAMES
        document = json.dumps(_Encoder(steps, frames).document(facts), separators=(",", ":"))
        encoded = zlib.compress(document.encode("ascii"), 6)
        if len(encoded) <= max_bytes and len(document) <= MAX_DECODED:
            return encoded
        if max_steps < 1:
            return None
        max_steps //= 4


class _Encoder:
    def __init__(self, max_steps: int, max_frames: int) -> None:
        self._max_steps, self._max_frames = max_steps, max_frames
        self._calls: dict[Call, int] = {}
        self._records: dict[str, int] = {}
        self._stacks: dict[str, int] = {}

    def document(self, facts: Sequence[RankFacts]) -> dict[str, Any]:
        ranks = [
            [
                found.rank,
                found.record.value if isinstance(found.record, NoRecord) else self._record(found.record),
                self._stack(found.frames),
            ]
            for found in facts
        ]
        return {
            "version": VERSION,
            "node": facts[0].node if facts else "",
            "ranks": ranks,
            "records": list(map(json.loads, self._records)),
            "stacks": list(map(json.loads, self._stacks)),
            "calls": list(self._calls),
        }

    def _record(self, record: RankRecord) -> int:
        groups = [
            [backend, name, group.description, self._runs(group)]
            for (backend, name), group in record.groups.items()
        ]
        members = [[name, _ranges(ranks)] for name, ranks in record.members.items()]
        fields = [groups, members, record.transfers, record.is_truncated, record.has_raised]
        return self._records.setdefault(json.dumps(fields), len(self._records))

    def _runs(self, group: GroupSteps) -> list[list[int]]:
        """Encode the group's steps (collectives) as runs of equal steps. Each run has four numbers: the first
        sequence number, the number of steps, the index of their call in the document, and their flags.
        """
        numbers = sorted(group.steps)
        kept = numbers[-self._max_steps :]
        first = next((seq for seq in numbers if not group.steps[seq].is_complete), kept[0])
        kept = kept if first >= kept[0] else [first, *kept]

        def run_of(item: tuple[int, int]) -> tuple[int, Step]:
            index, seq = item
            return seq - index, group.steps[seq]

        runs = []
        for (_, step), items in groupby(enumerate(kept), key=run_of):
            sequence = [seq for _, seq in items]
            flags = _COMPLETE * step.is_complete | _STARTED * step.is_started
            call = self._calls.setdefault(step.call, len(self._calls))
            runs.append([sequence[0], len(sequence), call, flags])
        return runs

    def _stack(self, frames: Sequence[Frame]) -> int | None:
        kept = json.dumps(frames[: self._max_frames])
        return self._stacks.setdefault(kept, len(self._stacks)) if frames else None


def _ranges(ranks: Sequence[int]) -> list[list[int]]:
    """Compress ascending ranks into lists of the first rank, the last rank, and the step.
    Evenly spaced ranks, such as those of a process group in a device mesh, need only one range.
    """
    found: list[list[int]] = []
    for rank in ranks:
        if found:
            first, last, step = found[-1]
            if rank == last + step or first == last:
                found[-1] = [first, rank, rank - last]
                continue
        found.append([rank, rank, 1])
    return found


def decode(encoded: bytes | None) -> list[RankFacts]:
    """Decode a node's facts about its ranks. Return no facts if they are missing, invalid or too large."""
    try:
        return [] if encoded is None else _Decoder(_document(encoded)).facts()
    # The decoder relies on Python's exceptions for missing keys, wrong lengths, and indexes out of range.
    except (zlib.error, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        return []  # The other node may run another version of elasticrs, whose evidence this one cannot read.


def _document(encoded: bytes) -> dict[str, Any]:
    stream = zlib.decompressobj()
    text = stream.decompress(encoded, MAX_DECODED)
    if not stream.eof or stream.unused_data:
        raise ValueError(f"not a complete zlib stream of at most {MAX_DECODED} decompressed bytes")
    document = of_type(dict, json.loads(text))
    if document.get("version") != VERSION:
        raise ValueError("unknown version")
    return document


class _Decoder:
    """Validates a JSON document. Converts each distinct record only once."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._steps = self._members = 0
        self._made: dict[tuple[int, int], Step] = {}
        self._node = _str(document["node"])
        self._calls = [
            Call(
                _str(operation),
                None if elements is None else number(elements),
                tuple(_str(name) for name in _list(dtypes)),
            )
            for operation, elements, dtypes in _list(document["calls"])
        ]
        self._records = [self._record(*_list(record)) for record in _list(document["records"])]
        self._stacks = [
            tuple(Frame(_str(file), number(line), _str(function)) for file, line, function in _list(stack))
            for stack in _list(document["stacks"])
        ]

    def facts(self) -> list[RankFacts]:
        return [
            RankFacts(
                number(rank),
                self._node,
                NoRecord(record) if type(record) is str else _at(self._records, record),
                () if stack is None else _at(self._stacks, stack),
            )
            for rank, record, stack in _list(self._document["ranks"])
        ]

    def _record(
        self, groups: Any, members: Any, transfers: Any, is_truncated: Any, has_raised: Any
    ) -> RankRecord:
        return RankRecord(
            {
                (_str(backend), _str(name)): GroupSteps(_str(description), self._steps_of(runs))
                for backend, name, description, runs in _list(groups)
            },
            {_str(name): self._ranks_of(ranks) for name, ranks in _list(members)},
            tuple(
                Transfer(_str(group), _str(description), None if peer is None else number(peer))
                for group, description, peer in _list(transfers)
            ),
            of_type(bool, is_truncated),
            of_type(bool, has_raised),
        )

    def _steps_of(self, runs: Any) -> dict[int, Step]:
        steps: dict[int, Step] = {}
        for first, count, call, flags in _list(runs):
            step = self._made.get((call, flags))
            if step is None:
                is_complete, is_started = bool(number(flags) & _COMPLETE), bool(flags & _STARTED)
                step = self._made[call, flags] = Step(_at(self._calls, call), is_complete, is_started)
            if not (type(first) is type(count) is int and 0 <= first < MAX_NUMBER and count > 0):
                raise ValueError(f"{first!r:.40} and {count!r:.40} are not a range of collectives")
            self._steps += count
            if self._steps > MAX_STEPS:
                raise ValueError(f"more than {MAX_STEPS} collectives")
            if count == 1:
                steps[first] = step
            else:
                steps.update(dict.fromkeys(range(first, first + count), step))
        if not steps:
            raise ValueError("a group has no collectives")
        return steps

    def _ranks_of(self, ranges: Any) -> tuple[int, ...]:
        found: list[int] = []
        for first, last, step in _list(ranges):
            if number(step) == 0 or number(last) < number(first) or (found and first <= found[-1]):
                raise ValueError("the members of a group are not in ascending order")
            ranks = range(first, last + 1, step)
            self._members += len(ranks)
            if self._members > MAX_DECODED:
                raise ValueError(f"more than {MAX_DECODED} members")
            found += ranks
        return tuple(found)


def _list(value: Any) -> list[Any]:
    return of_type(list, value)


def _str(value: Any) -> str:
    return of_type(str, value)


def _at(table: Sequence[_T], index: Any) -> _T:
    return table[number(index)]
