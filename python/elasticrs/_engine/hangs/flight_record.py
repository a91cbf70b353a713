"""Parses the flight record of one rank. A flight record is JSON in which torch describes the latest
collectives of a process.

``torch._C._distributed_c10d._dump_fr_trace_json`` (gloo) and ``_dump_nccl_trace_json`` (NCCL) write this
JSON. NCCL's watchdog writes the same data as a pickle, which is parsed without being unpickled.

- **REC-1** Whatever the bytes are, :func:`parse` returns a record whose fields have the declared types, or
  raises :class:`FlightRecordError`.
- **REC-2** Time and memory are limited by :data:`MAX_BYTES`, :data:`MAX_CONTAINERS` and :data:`MAX_ENTRIES`.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, NoReturn, TypeAlias, TypeVar

    _T = TypeVar("_T")
    Sizes: TypeAlias = "tuple[tuple[int, ...], ...]"

MAX_BYTES = 16 << 20
"""Maximum size of a record in bytes. 2,000 entries, torch's default, take 0.94 MB."""

MAX_CONTAINERS = 1 << 19
"""Maximum number of JSON arrays and objects. An empty array takes 2 bytes of text, but 56 bytes of memory."""

MAX_ENTRIES = 20_000
MAX_NAME = 1024
"""Maximum length of a name or a type, in characters."""

MAX_NUMBER = 1 << 63
MAX_DIMENSIONS = 64
"""Maximum number of dimensions of a tensor, as in torch. This limit also bounds the product of the sizes."""

_PICKLE = b"\x80"
"""First byte of a pickle. No JSON document starts with this byte."""

_MAJOR = "2"
"""Major version of the format. Torch increases this version when an existing field changes."""


class Damage(str, Enum):
    """Kinds of unusable records."""

    TOO_LARGE = "too large"
    NOT_JSON = "not JSON"
    NOT_PLAIN = "not a pickle of plain values"
    TOO_DEEP = "nested too deeply"
    UNSUPPORTED = "in an unsupported version"
    INVALID = "not a flight record"


class FlightRecordError(ValueError):
    """The bytes are not a flight record.

    Args:
        damage: kind of the problem.
        where: path of the invalid field, such as ``entries[3].state``, or details of the problem.
    """

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
    """A collective or point-to-point operation of one rank."""

    backend: str
    """Lower-case name of the backend: ``gloo``, ``nccl``. Empty if the record does not name it."""
    operation: str
    """Name of the operation without the backend, such as ``all_reduce`` or ``send 0->1``."""
    group_id: int
    """Number of the process group in this process. A group that is created later has a larger number."""
    group_name: str
    """Name of the process group. All ranks of the group use the same name."""
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
        """True if the operation has completed, according to the flight record.

        For gloo, which has no device events, the state stays ``scheduled`` and only ``retired`` changes. For
        other backends, an operation that is retired but not completed has timed out.
        """
        return self.state is State.COMPLETED or (self.retired and self.backend == "gloo")


class FlightRecord(NamedTuple):
    """The latest operations of one rank, in the order in which the rank called them."""

    entries: tuple[Entry, ...]
    is_truncated: bool
    """True if older entries were overwritten, because torch's buffer was full."""
    members: Mapping[str, tuple[int, ...]]
    """Global ranks of each process group, by the name of the group, if the record contains them. A record of
    gloo contains no global ranks: its only group has no name, and its ranks are relative to the group.
    """


def parse(data: bytes) -> FlightRecord:
    """Parse the flight record of one rank.

    Args:
        data: JSON or a pickle, as written by torch. Unknown fields are ignored. A pickle is parsed by
            :mod:`.pickled` and never unpickled.

    Raises:
        FlightRecordError: the data is incomplete, too large, or not a flight record.
    """
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
    from elasticrs._engine.hangs.pickled import PickledError, plain

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
    """Return the ranks of each named process group. The flight record contains the ranks as text, such as
    ``[0, 1]``.
    """
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
    """Converts the entries of one record. Checks each distinct value only once, because most entries repeat
    the same sizes and types.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, Sizes] = {}
        self._names: dict[str, tuple[str, str]] = {}

    def read(self, raw: object, index: int) -> Entry:
        """Convert the entry with this index.

        Raises:
            FlightRecordError: a field is missing or has a wrong type.
        """
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
