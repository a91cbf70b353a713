"""Parses the flight record of one rank: JSON in which torch describes the latest collectives of a process.

``torch._C._distributed_c10d._dump_fr_trace_json`` (gloo) and ``_dump_nccl_trace_json`` (NCCL) write it.
NCCL's watchdog writes the same data as a pickle, which is never unpickled.

- **REC-1** Whatever the bytes are, :func:`parse` returns a record whose fields have the declared types, or
  raises :class:`FlightRecordError`.
- **REC-2** Time and memory are limited by :data:`MAX_BYTES`, :data:`MAX_CONTAINERS` and :data:`MAX_ENTRIES`.
- **PICKLE-1** No pickle can import or call anything. For any input, :func:`plain` raises
  :class:`PickledError`, or returns lists, dictionaries, text, numbers, booleans and ``None``. No container in
  the result is contained in two others.
- **PICKLE-2** :data:`MAX_OPERATIONS` limits time and memory. The caller limits the size of the input.
"""

from __future__ import annotations

import json
from enum import Enum
from math import prod
from typing import NamedTuple

from elasticrs._engine.hangs.values import Call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, NoReturn, TypeAlias, TypeVar

    from elasticrs._engine.hangs.values import Frame, NoRecord

    _T = TypeVar("_T")
    Sizes: TypeAlias = "tuple[tuple[int, ...], ...]"

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

_NAMES = {
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


class Damage(str, Enum):
    TOO_LARGE = "too large"
    NOT_JSON = "not JSON"
    NOT_PLAIN = "not a pickle of plain values"
    TOO_DEEP = "nested too deeply"
    UNSUPPORTED = "in an unsupported version"
    INVALID = "not a flight record"


class FlightRecordError(ValueError):
    """The bytes are not a flight record. ``where`` is the path of the invalid field, or details."""

    def __init__(self, damage: Damage, where: str) -> None:
        self.damage = damage
        self.where = where
        super().__init__(f"the flight record is {damage.value}: {where}")


class State(str, Enum):
    """Progress of an operation on its device, as far as torch has observed it."""

    SCHEDULED = "scheduled"
    STARTED = "started"
    COMPLETED = "completed"


class Entry(NamedTuple):
    backend: str
    """Name of the back end in lower case, such as ``nccl``; empty if the record does not contain it."""
    operation: str
    """Operation without the backend, such as ``all_reduce`` or ``send 0->1``."""
    group_id: int
    """Number of the group in this process. A group that is created later has a larger number."""
    group_name: str
    """Name of the group, which is the same on all of its ranks."""
    group_description: str
    collective_seq_id: int
    """Number of the collective in its group, starting at 1."""
    is_p2p: bool
    input_sizes: Sizes
    input_dtypes: tuple[str, ...]
    state: State
    retired: bool
    """True if torch no longer tracks the operation, because it has completed or failed."""

    @property
    def is_complete(self) -> bool:
        """True if the operation has completed. Gloo has no device events, so its entries only become
        ``retired``. With other backends, an operation that is retired but not completed has timed out.
        """
        return self.state is State.COMPLETED or (self.retired and self.backend == "gloo")


class FlightRecord(NamedTuple):
    entries: tuple[Entry, ...]
    is_truncated: bool
    """True if older entries were overwritten, because torch's buffer was full."""
    members: Mapping[str, tuple[int, ...]]
    """Global ranks of each process group, by name. Records of gloo have only one group, which has no name,
    and whose ranks are not global.
    """


def parse(data: bytes) -> FlightRecord:
    """Parse torch's JSON or pickle. Raise :class:`FlightRecordError` if it is incomplete or too large."""
    if len(data) > MAX_BYTES:
        raise FlightRecordError(Damage.TOO_LARGE, f"{len(data)} bytes")
    try:
        return _record(_unpickled(data) if data.startswith(_PICKLE) else _decoded(data))
    except RecursionError:
        raise FlightRecordError(Damage.TOO_DEEP, f"{len(data)} bytes") from None


def _record(decoded: object) -> FlightRecord:
    record = _of(dict, decoded, "the record")
    version = _text(record, "version")
    if version.partition(".")[0] != _MAJOR:
        raise FlightRecordError(Damage.UNSUPPORTED, version)
    raw = _of(list, record.get("entries", []), "entries")  # Torch omits `entries` if the list is empty.
    if len(raw) > MAX_ENTRIES:
        raise FlightRecordError(Damage.TOO_LARGE, f"{len(raw)} entries")
    reader = _EntryReader()
    entries = tuple([reader.read(item, index) for index, item in enumerate(raw)])
    first = _number(raw[0], "record_id") if raw else 0
    return FlightRecord(entries, first > 0, _members(record.get("pg_config", {})))


def _unpickled(data: bytes) -> object:
    try:
        return plain(data)
    except PickledError as error:
        raise FlightRecordError(Damage.NOT_PLAIN, str(error)) from error


def _decoded(data: bytes) -> object:
    containers = data.count(b"[") + data.count(b"{")
    if containers > MAX_CONTAINERS:
        raise FlightRecordError(Damage.TOO_LARGE, f"{containers} arrays and objects")
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except ValueError as error:  # JSON errors, invalid UTF-8 and very long integers raise `ValueError`.
        raise FlightRecordError(Damage.NOT_JSON, str(error)) from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _fail(where: str) -> NoReturn:
    raise FlightRecordError(Damage.INVALID, where)


def _of(kind: type[_T], value: object, where: str) -> _T:
    if type(value) is not kind:
        _fail(where)
    return value


def _text(record: dict[str, Any], field: str) -> str:
    value = record.get(field)
    if type(value) is not str or len(value) > MAX_NAME:
        _fail(field)
    return value


def _number(record: dict[str, Any], field: str) -> int:
    value = record.get(field)
    if type(value) is not int or not 0 <= value < MAX_NUMBER:
        _fail(field)
    return value


def _members(config: object) -> dict[str, tuple[int, ...]]:
    """Parse the ranks of each named group. The record contains them as text, such as ``[0, 1]``."""
    members = {}
    for name, raw in _of(dict, config, "pg_config").items():
        group = _of(dict, raw, "pg_config")
        if name and group.get("name") == name:
            text = group.get("ranks")
            if type(text) is not str or not (text.startswith("[") and text.endswith("]")):
                _fail(f"pg_config.{name[:MAX_NAME]}.ranks")
            parts = [part.strip() for part in text[1:-1].split(",") if part.strip()]
            if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
                _fail(f"pg_config.{name[:MAX_NAME]}.ranks")
            members[name] = tuple(sorted({int(part) for part in parts}))
    return members


class _EntryReader:
    """Parser for entries. It checks each distinct value once, because most sizes and types are repeated."""

    def __init__(self) -> None:
        self._sizes: dict[str, Sizes] = {}
        self._names: dict[str, tuple[str, str]] = {}

    def read(self, raw: object, index: int) -> Entry:
        entry = _of(dict, raw, f"entries[{index}]")
        try:
            return self._convert(entry)
        except FlightRecordError as error:
            raise FlightRecordError(error.damage, f"entries[{index}].{error.where}") from None

    def _convert(self, entry: dict[str, Any]) -> Entry:
        backend, operation = self._name(_text(entry, "profiling_name"))
        group = entry.get("process_group")
        if type(group) is not list or len(group) != 2:
            _fail("process_group")
        name, description = group
        if type(name) is not str or type(description) is not str or len(name) + len(description) > MAX_NAME:
            _fail("process_group")
        state = _STATES.get(_text(entry, "state"))
        if state is None:
            _fail("state")
        return Entry(
            backend,
            operation,
            _number(entry, "pg_id"),
            name,
            description,
            _number(entry, "collective_seq_id"),
            _of(bool, entry.get("is_p2p", False), "is_p2p"),
            self._shape(entry, "input_sizes"),
            _types(entry, "input_dtypes"),
            state,
            _of(bool, entry.get("retired"), "retired"),
        )

    def _name(self, profiling_name: str) -> tuple[str, str]:
        known = self._names.get(profiling_name)
        if known is None:
            backend, separator, operation = profiling_name.partition(":")
            known = (backend.lower(), operation) if separator else ("", profiling_name)
            self._names[profiling_name] = known
        return known

    def _shape(self, entry: dict[str, Any], field: str) -> Sizes:
        value = entry.get(field)
        key = repr(value)
        known = self._sizes.get(key)
        if known is None:
            if type(value) is not list:
                _fail(field)
            if not all(type(sizes) is list and len(sizes) <= MAX_DIMENSIONS for sizes in value):
                _fail(field)
            if not all(type(size) is int and 0 <= size < MAX_NUMBER for sizes in value for size in sizes):
                _fail(field)
            known = self._sizes[key] = tuple([tuple(sizes) for sizes in value])
        return known


def _types(entry: dict[str, Any], field: str) -> tuple[str, ...]:
    value = entry.get(field, [])
    if type(value) is not list or not all(type(name) is str and len(name) <= MAX_NAME for name in value):
        _fail(field)
    return tuple(value)


_STATES = {state.value: state for state in State}


class PickledError(ValueError):
    """The data is not a pickle of plain values."""


def plain(data: bytes) -> object:
    """Parse a pickle. Tuples become lists. Raise :class:`PickledError` unless it has only plain values."""
    import pickletools

    reader = _PickleReader()
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
            if count + reader.copied > MAX_OPERATIONS:
                raise PickledError(f"more than {MAX_OPERATIONS} opcodes and copied items")
            reader.take(operation.name, argument)
        return reader.result()
    except PickledError:
        raise
    # `genops` raises `ValueError` for malformed input. The other exceptions show that an operand is missing
    # or wrong.
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise PickledError(f"{type(error).__name__}: {error}") from error


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
            self._join(_TUPLES[name])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "TUPLE":
            stack.append(self._marked())
        elif name in ("APPEND", "APPENDS"):
            items = [self._value()] if name == "APPEND" else self._marked()
            _plain(list, stack[-1]).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [self._value(), self._value()][::-1] if name == "SETITEM" else self._marked()
            _plain(dict, stack[-1]).update(zip(map(_plain_key, items[::2]), items[1::2], strict=True))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise PickledError(f"it contains the opcode {name}")

    def _copy(self, value: Any) -> Any:
        """Copy a container, because a malicious pickle could otherwise append a list to itself. Reject a
        nested container, because copying it repeatedly could create an exponentially large value.
        """
        if type(value) not in (list, dict):
            return value
        items = value.values() if type(value) is dict else value
        if any(type(item) in (list, dict) for item in items):
            raise PickledError("it uses a nested list or dictionary twice")
        self.copied += len(value)
        return value.copy()

    def _join(self, count: int) -> None:
        self._stack.append([self._value() for _ in range(count)][::-1])

    def _value(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise PickledError("an opcode lacks an operand")
        return value

    def _marked(self) -> list[Any]:
        items = []
        while (item := self._stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def result(self) -> object:
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise PickledError("it does not end with a single value")
        return self._stack[0]


def _plain(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise PickledError(f"found a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _plain_key(key: Any) -> Any:
    if type(key) not in (str, int):
        raise PickledError(f"a dictionary key has the type {type(key).__name__}")
    return key


class Step(NamedTuple):
    call: Call
    is_complete: bool
    is_started: bool
    """True if the collective has started on the rank's device."""


class GroupSteps(NamedTuple):
    description: str
    steps: Mapping[int, Step]
    """Steps by sequence number. Never empty."""


class Transfer(NamedTuple):
    group: str
    description: str
    """The group's description, as set by the program."""
    peer: int | None
    """The peer's rank within the group; ``None`` if unknown."""


class RankRecord(NamedTuple):
    """One rank's flight records, reduced to the fields that a diagnosis uses."""

    groups: Mapping[tuple[str, str], GroupSteps]
    """Collectives of each process group, by the group's backend and name."""
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


def reduced(
    records: Sequence[FlightRecord], groups: Mapping[str, Sequence[int]], *, has_raised: bool
) -> RankRecord:
    """Reduce one rank's flight records, one from each of torch's recorders.

    ``has_raised`` is true if the program raised an exception before the records were taken.
    """
    drafts = _drafts(records)
    transfers = tuple(
        dict.fromkeys(
            Transfer(entry.group_name, entry.group_description, _peer(entry.operation))
            for record in records
            for entry in record.entries
            if entry.is_p2p and not entry.is_complete
        )
    )
    if has_raised:
        for draft in drafts.values():
            # The last collective may have failed and caused the exception. The record cannot show this,
            # because torch marks failed and completed collectives alike.
            last = max(draft.steps)
            draft.steps[last] = draft.steps[last]._replace(is_complete=False)
    members = {name: tuple(sorted(set(ranks))) for name, ranks in groups.items()}
    for record in reversed(records):
        members.update(record.members)
    names = {name for _, name in drafts} | {transfer.group for transfer in transfers}
    return RankRecord(
        {key: GroupSteps(draft.description, draft.steps) for key, draft in drafts.items()},
        {name: members[name] for name in sorted(names) if members.get(name)},
        transfers,
        any(record.is_truncated for record in records),
        has_raised,
    )


class _Draft(NamedTuple):
    group_id: int
    description: str
    steps: dict[int, Step]


def _drafts(records: Sequence[FlightRecord]) -> dict[tuple[str, str], _Draft]:
    drafts: dict[tuple[str, str], _Draft] = {}
    reader = _CallReader()
    for flight_record in records:
        for entry in flight_record.entries:
            if entry.is_p2p:
                continue
            key = entry.backend, entry.group_name
            draft = drafts.get(key)
            if draft is None or entry.group_id > draft.group_id:
                # A program that recreates its groups reuses their names, so keep the latest group.
                draft = drafts[key] = _Draft(entry.group_id, entry.group_description, {})
            if entry.group_id == draft.group_id:
                draft.steps[entry.collective_seq_id] = reader.read(
                    entry, draft.steps.get(entry.collective_seq_id)
                )
    return drafts


class _CallReader:
    """Converter from entries to calls. Equal calls share one object, because most entries repeat a call."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, Sizes, tuple[str, ...]], Call] = {}

    def read(self, entry: Entry, earlier: Step | None) -> Step:
        """Convert an entry to a step. ``earlier`` is the step so far, if several entries belong to a
        collective.
        """
        key = entry.operation, entry.input_sizes, entry.input_dtypes
        call = self._calls.get(key)
        if call is None:
            operation = _NAMES.get(entry.operation, entry.operation)
            if operation in _SAME_ON_ALL_RANKS:
                elements = sum(map(prod, entry.input_sizes))
                call = Call(operation, elements, entry.input_dtypes)
            else:
                call = Call(operation)
            self._calls[key] = call
        is_complete, is_started = entry.is_complete, entry.state is not State.SCHEDULED
        if earlier is not None:
            call = Call("coalesced")
            is_complete, is_started = is_complete or earlier.is_complete, is_started or earlier.is_started
        return Step(call, is_complete, is_started)


def _peer(operation: str) -> int | None:
    """Parse the peer's rank in the group from ``send 0->1`` or ``recv 0<-1``."""
    for arrow in ("->", "<-"):
        _, found, peer = operation.partition(arrow)
        if found and peer.isascii() and peer.isdigit() and len(peer) < 10:
            return int(peer)
    return None
