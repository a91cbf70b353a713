"""Encodes the evidence about one node's ranks, for other nodes, as compressed JSON that shares equal values.

- **NODE-1** An encoding never exceeds the requested number of bytes. If necessary, the earliest collectives
  and the outermost stack frames are left out.
- **NODE-2** For any input, :func:`decode` returns facts whose fields have the declared types, or raises
  :class:`NodeEvidenceError`. :data:`MAX_DECODED` and :data:`MAX_STEPS` limit its time and memory.
"""

from __future__ import annotations

import json
import zlib
from itertools import groupby

from elasticrs._engine.hangs.flight_record import GroupSteps, RankFacts, RankRecord, Step, Transfer
from elasticrs._engine.hangs.values import Call, Frame, NoRecord

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TypeVar

    _T = TypeVar("_T")

VERSION = 1
MAX_DECODED = 4 << 20
"""Maximum size of the decoded JSON in bytes, and maximum number of ranks in all lists of group members."""

MAX_STEPS = 100_000
"""Maximum total number of collectives in one encoding."""

MAX_FRAMES = 48
"""Maximum number of frames to encode per stack. The innermost frames are kept."""

_FEWEST_FRAMES = 12
_MAX_NUMBER = 1 << 63
_COMPLETE, _STARTED = 1, 2


class NodeEvidenceError(ValueError):
    """The bytes are not valid evidence."""


# --- encoding ---


def encode(facts: Sequence[RankFacts], *, max_bytes: int, max_steps: int) -> bytes | None:
    """Encode one node's facts; ``None`` if ``max_bytes`` or :data:`MAX_DECODED` is too small.

    ``max_steps`` limits the number of collectives per rank and group. If there are more, only the latest ones
    and the first incomplete one are kept.
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
        self._files: dict[str, int] = {}
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
            "calls": [[call.operation, call.elements, list(call.dtypes)] for call in self._calls],
            "files": list(self._files),
        }

    def _record(self, record: RankRecord) -> int:
        groups = [
            [backend, name, group.description, self._runs(group)]
            for (backend, name), group in record.groups.items()
        ]
        members = [[name, _ranges(ranks)] for name, ranks in record.members.items()]
        transfers = [list(transfer) for transfer in record.transfers]
        fields = [groups, members, transfers, record.is_truncated, record.has_raised]
        return self._records.setdefault(json.dumps(fields), len(self._records))

    def _runs(self, group: GroupSteps) -> list[list[int]]:
        """Return runs of consecutive equal steps. Each run is a list of the first sequence number, the
        length, the index of the call, and flags.
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
        kept = [
            [self._files.setdefault(frame.file, len(self._files)), frame.line, frame.function]
            for frame in frames[: self._max_frames]
        ]
        return self._stacks.setdefault(json.dumps(kept), len(self._stacks)) if kept else None


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


# --- decoding ---


def decode(encoded: bytes) -> list[RankFacts]:
    """Decode facts. Raise :class:`NodeEvidenceError` if the bytes are invalid or exceed a limit."""
    try:
        return _Decoder(_document(encoded)).facts()
    # The decoder relies on Python's exceptions for missing keys, wrong lengths, and indexes out of range.
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise NodeEvidenceError(f"{type(error).__name__}: {error}") from error


def _document(encoded: bytes) -> dict[str, Any]:
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(encoded, MAX_DECODED)
    except zlib.error as error:
        raise NodeEvidenceError(str(error)) from error
    if not stream.eof or stream.unused_data:
        raise NodeEvidenceError(f"not a complete zlib stream of at most {MAX_DECODED} decompressed bytes")
    document = json.loads(text)
    if type(document) is not dict or document.get("version") != VERSION:
        raise NodeEvidenceError("unknown version")
    return document


class _Decoder:
    """Validates a JSON document. Converts each distinct record only once."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._steps = self._members = 0
        self._made: dict[tuple[int, int], Step] = {}
        self._node = _of(str, document["node"])
        self._files = [_of(str, file) for file in _of(list, document["files"])]
        self._calls = [
            Call(
                _of(str, operation),
                None if elements is None else _count(elements),
                tuple(_of(str, name) for name in _of(list, dtypes)),
            )
            for operation, elements, dtypes in _of(list, document["calls"])
        ]
        self._records = [self._record(*_of(list, record)) for record in _of(list, document["records"])]
        self._stacks = [
            tuple(
                Frame(_at(self._files, file), _count(line), _of(str, function))
                for file, line, function in _of(list, stack)
            )
            for stack in _of(list, document["stacks"])
        ]

    def facts(self) -> list[RankFacts]:
        return [
            RankFacts(
                _count(rank),
                self._node,
                NoRecord(record) if type(record) is str else _at(self._records, record),
                () if stack is None else _at(self._stacks, stack),
            )
            for rank, record, stack in _of(list, self._document["ranks"])
        ]

    def _record(
        self, groups: Any, members: Any, transfers: Any, is_truncated: Any, has_raised: Any
    ) -> RankRecord:
        return RankRecord(
            {
                (_of(str, backend), _of(str, name)): GroupSteps(_of(str, description), self._steps_of(runs))
                for backend, name, description, runs in _of(list, groups)
            },
            {_of(str, name): self._ranks_of(ranks) for name, ranks in _of(list, members)},
            tuple(
                Transfer(_of(str, group), _of(str, description), None if peer is None else _count(peer))
                for group, description, peer in _of(list, transfers)
            ),
            _of(bool, is_truncated),
            _of(bool, has_raised),
        )

    def _steps_of(self, runs: Any) -> dict[int, Step]:
        steps: dict[int, Step] = {}
        for first, count, call, flags in _of(list, runs):
            step = self._made.get((call, flags))
            if step is None:
                made = _at(self._calls, call), bool(_count(flags) & _COMPLETE), bool(flags & _STARTED)
                step = self._made[call, flags] = Step(*made)
            if not (type(first) is type(count) is int and 0 <= first < _MAX_NUMBER and count > 0):
                raise NodeEvidenceError(f"{first!r:.40} and {count!r:.40} are not a range of collectives")
            self._steps += count
            if self._steps > MAX_STEPS:
                raise NodeEvidenceError(f"more than {MAX_STEPS} collectives")
            if count == 1:
                steps[first] = step
            else:
                steps.update(dict.fromkeys(range(first, first + count), step))
        if not steps:
            raise NodeEvidenceError("a group has no collectives")
        return steps

    def _ranks_of(self, ranges: Any) -> tuple[int, ...]:
        found: list[int] = []
        for first, last, step in _of(list, ranges):
            if _count(step) == 0 or _count(last) < _count(first) or (found and first <= found[-1]):
                raise NodeEvidenceError("the members of a group are not in ascending order")
            ranks = range(first, last + 1, step)
            self._members += len(ranks)
            if self._members > MAX_DECODED:
                raise NodeEvidenceError(f"more than {MAX_DECODED} members")
            found += ranks
        return tuple(found)


def _of(kind: type[_T], value: Any) -> _T:
    if type(value) is not kind:
        raise NodeEvidenceError(f"{value!r:.40} is not a {kind.__name__}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_NUMBER:
        raise NodeEvidenceError(f"{value!r:.40} is not a count")
    return value


def _at(table: Sequence[_T], index: Any) -> _T:
    return table[_count(index)]
