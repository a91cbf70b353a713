"""Parses the flight records of one rank, in which torch describes the latest collectives of a process.

``torch._C._distributed_c10d._dump_fr_trace_json`` (gloo) and ``_dump_nccl_trace_json`` (NCCL) write JSON.
NCCL's watchdog writes the same data as a pickle, which is never unpickled.

- **REC-1** Whatever the bytes are, :func:`parse` returns a record whose fields have the declared types, or
  raises :class:`FlightRecordError`.
- **REC-2** Time and memory are limited by :data:`MAX_BYTES`, :data:`MAX_CONTAINERS` and :data:`MAX_ENTRIES`.
- **PICKLE-1** No pickle can import or call anything. For any input, :func:`plain` raises
  :class:`FlightRecordError`, or returns lists, dictionaries, text, numbers, booleans and ``None``. No
  container in the result is contained in two others.
- **PICKLE-2** :data:`MAX_OPERATIONS` limits time and memory. The caller limits the size of the input.
"""

from __future__ import annotations

import json
from enum import Enum
from math import prod
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any, NoReturn, TypeVar

    from elasticrs._engine.hangs.stacks import Frame

    _T = TypeVar("_T")

MAX_BYTES = 16 << 20
"""Maximum size of a record in bytes. 2,000 entries, torch's default, take 0.94 MB."""

MAX_CONTAINERS = 1 << 19
"""Maximum number of JSON arrays and objects. An empty array takes 2 bytes of text, but 56 bytes of memory."""

MAX_ENTRIES = 20_000
MAX_NAME = 1024

MAX_NUMBER = 1 << 63
MAX_DIMENSIONS = 64
"""Maximum number of dimensions of a tensor, as in torch. It also limits the product of a tensor's sizes."""

_PICKLE = b"\x80"
"""First byte of a pickle. No JSON document starts with this byte."""

_MAJOR = "2"
"""Version of the flight record's format. Torch increases it when the meaning of an existing field changes."""

MAX_OPERATIONS = 1_000_000
"""Maximum number of opcodes plus copied items in a pickle. 2,000 entries without stacks need 110,000."""

_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"))
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = frozenset(("BINPUT", "LONG_BINPUT")), frozenset(("BINGET", "LONG_BINGET"))
_MARK = object()

DEFAULT_GROUP = "default_pg"
"""Torch's description of the default process group, which contains all ranks."""

NAMES = {
    "_all_gather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce_barrier": "barrier",
    "all_to_all_single": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
}
"""Common name for each variant of an operation. Ranks may call different variants for the same collective."""

_SAME_ON_ALL_RANKS = frozenset(("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"))
"""Operations whose input has the same element count and element type on all ranks."""

_STATES = ("scheduled", "started", "completed")
"""Progress of an operation on its device, as far as torch has observed it."""


class NoRecord(str, Enum):
    NO_TORCH = "no_torch"
    OFF = "off"
    """The recorder is off (``TORCH_FR_BUFFER_SIZE=0``), or this version of torch has none."""
    LATE = "late"
    """The worker did not answer in time, for example because it holds the GIL."""
    EXITED = "exited"
    ABORTED = "aborted"
    """A native thread may have aborted the worker. gloo aborts a rank that receives more than it expects,
    which happens if the calls of the ranks differ. The aborted rank may be innocent.
    """
    RETURNED = "returned"
    """The worker's program has returned, and its interpreter runs no more Python code."""
    LOST_PEER = "lost_peer"
    """The worker raised an exception that reports a lost peer, so it was waiting."""
    LOST = "lost"
    DAMAGED = "damaged"
    OUTDATED = "outdated"
    """The rank's record lacks a collective that other ranks have completed and that needs this rank."""


class Call(NamedTuple):
    """Properties of a rank's call to a collective that must be the same on all ranks."""

    operation: str
    elements: int | None = None
    """Number of elements of the input; ``None`` if ranks may pass different numbers."""
    dtypes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.elements is None:
            return self.operation
        return f"{self.operation} of {self.elements:,} {'/'.join(dict.fromkeys(self.dtypes))}".rstrip()


class FlightRecordError(ValueError):
    """Raised if bytes are no valid flight record. The text names the first invalid field, or the limit."""


class Step(NamedTuple):
    call: Call
    is_complete: bool
    is_started: bool
    """True if the collective has started on the rank's device."""


class GroupSteps(NamedTuple):
    description: str
    steps: Mapping[int, Step]
    """Steps by sequence number, starting at 1. Empty if the rank has called no collective of the group."""

    @property
    def entered(self) -> int:
        """Sequence number of the group's last collective that the rank has called; 0 if there is none."""
        return max(self.steps, default=0)

    @property
    def waits_in(self) -> int | None:
        """Sequence number of the group's first collective that has not completed; ``None`` if all have."""
        return min((seq for seq, step in self.steps.items() if not step.is_complete), default=None)


class Transfer(NamedTuple):
    """Point-to-point operation (send or receive) that has not completed."""

    group: str
    description: str
    peer: int | None
    """The peer's rank within the group; ``None`` if unknown."""


class RankRecord(NamedTuple):
    """One rank's flight records, reduced to the fields that a diagnosis uses."""

    groups: Mapping[tuple[str, str], GroupSteps]
    """Collectives of each process group (at least one), by the group's backend and name."""
    members: Mapping[str, tuple[int, ...]] = {}
    """Global ranks by group name. Groups whose members are unknown are left out."""
    transfers: tuple[Transfer, ...] = ()
    is_truncated: bool = False
    """True if torch's buffer was full, so that older operations were overwritten."""
    has_raised: bool = False


class RankFacts(NamedTuple):
    rank: int
    node: str
    """Name of the rank's node; empty if unknown."""
    record: RankRecord | NoRecord
    frames: tuple[Frame, ...] = ()
    """The main thread's stack frames, innermost first. Empty if the stack is unknown."""


def parse(
    records: Iterable[bytes],
    groups: Mapping[str, Sequence[int]] = {},
    *,
    has_raised: bool = False,
) -> RankRecord:
    """Parse the flight records (torch's logs of collectives) of one rank. Each of torch's recorders has
    written one, as JSON or as a pickle. ``groups`` are the global ranks, by group name, of process groups
    that the records do not describe. ``has_raised`` is true if the program raised an exception before the
    records were written. Raise :class:`FlightRecordError` if a record is invalid or too large.
    """
    reader = _Reader()
    try:
        for data in records:
            reader.read(plain(data) if data.startswith(_PICKLE) else _decoded(data))
    except RecursionError:
        raise FlightRecordError("it is nested too deeply") from None
    return reader.result(groups, has_raised=has_raised)


def _decoded(data: bytes) -> object:
    containers = data.count(b"[") + data.count(b"{")
    if len(data) > MAX_BYTES or containers > MAX_CONTAINERS:
        raise FlightRecordError(f"it has {len(data)} bytes and {containers} arrays and objects")
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_fail)
    except ValueError as error:  # JSON errors, invalid UTF-8 and very long integers raise `ValueError`.
        raise FlightRecordError(str(error)) from error


def _fail(where: str) -> NoReturn:
    raise FlightRecordError(where)


def of_type(kind: type[_T], value: object, where: str = "value") -> _T:
    if type(value) is not kind:
        _fail(where)
    return value


def number(value: object, where: str = "value") -> int:
    if type(value) is not int or not 0 <= value < MAX_NUMBER:
        _fail(where)
    return value


def _text(record: dict[str, Any], field: str) -> str:
    value = record.get(field)
    if type(value) is not str or len(value) > MAX_NAME:
        _fail(field)
    return value


def _members(config: object) -> dict[str, tuple[int, ...]]:
    """Parse the global ranks of each process group, which the record contains as text, such as ``[0, 1]``.
    Skip groups without a name, because these are in records of gloo, where their ranks are not global.
    """
    members = {}
    for name, raw in of_type(dict, config, "pg_config").items():
        group = of_type(dict, raw, "pg_config")
        if name and type(name) is str and group.get("name") == name:
            text = group.get("ranks")
            if type(text) is not str or not (text.startswith("[") and text.endswith("]")):
                _fail(f"pg_config.{name[:MAX_NAME]}.ranks")
            parts = [part.strip() for part in text[1:-1].split(",") if part.strip()]
            if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
                _fail(f"pg_config.{name[:MAX_NAME]}.ranks")
            members[name] = tuple(sorted({int(part) for part in parts}))
    return members


class _Draft(NamedTuple):
    group_id: int
    description: str
    steps: dict[int, Step]


class _Reader:
    """Collects the calls in one rank's records. Converts equal calls only once, because most are repeated."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str, str], Call] = {}
        self._drafts: dict[tuple[str, str], _Draft] = {}
        self._transfers: dict[Transfer, None] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._is_truncated = False

    def read(self, decoded: object) -> None:
        record = of_type(dict, decoded, "the record")
        if _text(record, "version").partition(".")[0] != _MAJOR:
            _fail("version")
        entries = of_type(list, record.get("entries", []), "entries")  # Torch omits `entries` if it is empty.
        if len(entries) > MAX_ENTRIES:
            _fail(f"{len(entries)} entries")
        for entry in entries:
            self._read_entry(of_type(dict, entry, "entries"))
        # If the first entry is not number 0, torch's buffer was full, so older entries were overwritten.
        self._is_truncated |= bool(entries) and number(entries[0].get("record_id"), "record_id") > 0
        self._members = {**_members(record.get("pg_config", {})), **self._members}

    def _read_entry(self, entry: dict[str, Any]) -> None:
        backend, separator, operation = _text(entry, "profiling_name").partition(":")
        backend, operation = (backend.lower(), operation) if separator else ("", backend)
        group = entry.get("process_group")
        if type(group) is not list or [type(part) for part in group] != [str, str]:
            _fail("process_group")
        name, description = group
        if len(name) + len(description) > MAX_NAME:
            _fail("process_group")
        state = _text(entry, "state")
        if state not in _STATES:
            _fail("state")
        call, seq, group_id = (
            self._call(entry, operation),
            number(entry.get("collective_seq_id"), "collective_seq_id"),
            number(entry.get("pg_id"), "pg_id"),
        )
        # Torch marks an operation as retired when it stops tracking it. Operations of gloo never get the
        # state "completed", because gloo has no device events, so a retired one counts as completed. With
        # other backends, an operation that is retired but not completed has timed out.
        is_retired = of_type(bool, entry.get("retired"), "retired")
        is_complete = state == "completed" or (is_retired and backend == "gloo")
        if of_type(bool, entry.get("is_p2p", False), "is_p2p"):
            if not is_complete:
                self._transfers[Transfer(name, description, _peer(operation))] = None
            return
        draft = self._drafts.get((backend, name))
        if draft is None or group_id > draft.group_id:
            # A program that recreates its groups reuses their names, so keep the latest group.
            draft = self._drafts[backend, name] = _Draft(group_id, description, {})
        if group_id == draft.group_id:
            step = Step(call, is_complete, state != "scheduled")
            if (part := draft.steps.get(seq)) is not None:
                # Several entries with the same sequence number are parts of one (coalesced) collective.
                started = step.is_started or part.is_started
                step = Step(Call("coalesced"), is_complete or part.is_complete, started)
            draft.steps[seq] = step

    def _call(self, entry: dict[str, Any], operation: str) -> Call:
        sizes, dtypes = entry.get("input_sizes"), entry.get("input_dtypes", [])
        key = operation, repr(sizes), repr(dtypes)
        call = self._calls.get(key)
        if call is None:
            if type(sizes) is not list or not all(
                type(each) is list and len(each) <= MAX_DIMENSIONS for each in sizes
            ):
                _fail("input_sizes")
            if not all(type(size) is int and 0 <= size < MAX_NUMBER for each in sizes for size in each):
                _fail("input_sizes")
            if type(dtypes) is not list or not all(
                type(each) is str and len(each) <= MAX_NAME for each in dtypes
            ):
                _fail("input_dtypes")
            call = Call(NAMES.get(operation, operation))
            if call.operation in _SAME_ON_ALL_RANKS:
                call = Call(call.operation, sum(map(prod, sizes)), tuple(dtypes))
            self._calls[key] = call
        return call

    def result(self, groups: Mapping[str, Sequence[int]], *, has_raised: bool) -> RankRecord:
        if has_raised:
            for draft in self._drafts.values():
                # Count the last one as incomplete, because torch marks failed collectives as completed, too.
                last = max(draft.steps)
                draft.steps[last] = draft.steps[last]._replace(is_complete=False)
        members = {name: tuple(sorted(set(ranks))) for name, ranks in groups.items()} | self._members
        names = {name for _, name in self._drafts} | {transfer.group for transfer in self._transfers}
        return RankRecord(
            {key: GroupSteps(draft.description, draft.steps) for key, draft in self._drafts.items()},
            {name: members[name] for name in sorted(names) if members.get(name)},
            tuple(self._transfers),
            self._is_truncated,
            has_raised,
        )


def _peer(operation: str) -> int | None:
    """Parse the peer's rank in the group from ``send 0->1`` or ``recv 0<-1``."""
    for arrow in ("->", "<-"):
        _, found, peer = operation.partition(arrow)
        if found and peer.isascii() and peer.isdigit() and len(peer) < 10:
            return int(peer)
    return None


# --- pickles ---


def plain(data: bytes) -> object:
    """Parse a pickle of plain values; tuples become lists. Raise :class:`FlightRecordError` for others."""
    import pickletools

    if len(data) > MAX_BYTES:
        raise FlightRecordError(f"it has {len(data)} bytes")
    reader = _PickleReader()
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
            if count + reader.copied > MAX_OPERATIONS:
                raise FlightRecordError(f"more than {MAX_OPERATIONS} opcodes and copied items")
            reader.take(operation.name, argument)
        return reader.result()
    except FlightRecordError:
        raise
    # `genops` raises `ValueError` for malformed input. Missing or wrong operands cause the other exceptions.
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise FlightRecordError(f"{type(error).__name__}: {error}") from error


class _PickleReader:
    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self.copied = 0
        """Total number of items in all copied containers."""

    def take(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _PUTS:
            self._memo[argument] = stack[-1]
        elif name in _GETS:
            stack.append(self._copy(self._memo[argument]))
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if name == "EMPTY_LIST" else {})
        elif name in _TUPLES:
            stack.append([self._value() for _ in range(_TUPLES[name])][::-1])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "TUPLE":
            stack.append(self._marked())
        elif name in ("APPEND", "APPENDS"):
            items = [self._value()] if name == "APPEND" else self._marked()
            of_type(list, stack[-1]).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [self._value(), self._value()][::-1] if name == "SETITEM" else self._marked()
            of_type(dict, stack[-1]).update(zip(map(_plain_key, items[::2]), items[1::2], strict=True))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise FlightRecordError(f"it contains the opcode {name}")

    def _copy(self, value: Any) -> Any:
        """Copy a container, because a malicious pickle could otherwise append a list to itself. Reject a
        nested container, because copying it repeatedly could create an exponentially large value.
        """
        if type(value) not in (list, dict):
            return value
        items = value.values() if type(value) is dict else value
        if any(type(item) in (list, dict) for item in items):
            raise FlightRecordError("it uses a nested list or dictionary twice")
        self.copied += len(value)
        return value.copy()

    def _value(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise FlightRecordError("an opcode lacks an operand")
        return value

    def _marked(self) -> list[Any]:
        items = []
        while (item := self._stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def result(self) -> object:
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise FlightRecordError("it does not end with a single value")
        return self._stack[0]


def _plain_key(key: Any) -> Any:
    if type(key) not in (str, int):
        raise FlightRecordError(f"a dictionary key has the type {type(key).__name__}")
    return key
