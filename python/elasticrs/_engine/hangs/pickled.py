"""Parses the pickled flight records that torch writes to files, without unpickling them.

Unpickling could run code supplied by the worker. This parser accepts only the opcodes that build lists,
dictionaries, text, numbers, booleans and ``None``, so no input can import or call anything.

- **PICKLE-1** For any input, :func:`plain` either returns a value built from these types or raises
  :class:`PickledError`. No list or dictionary in the result is contained in two others.
- **PICKLE-2** :data:`MAX_OPERATIONS` limits time and memory. The caller limits the size of the input.
"""

from __future__ import annotations

import pickletools

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_OPERATIONS = 1_000_000
"""Maximum number of opcodes plus copied items. A record of 2,000 entries without stacks needs 110,000."""

_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"))
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = frozenset(("BINPUT", "LONG_BINPUT")), frozenset(("BINGET", "LONG_BINGET"))
_MARK = object()


class PickledError(ValueError):
    """Raised if the data is not a pickle that contains only plain values."""


def plain(data: bytes) -> object:
    """Parse a pickle and return its value. Tuples become lists.

    Raises:
        PickledError: the pickle is damaged or too large, or contains an opcode that this parser rejects.
    """
    reader = _Reader()
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
            if count + reader.copied > MAX_OPERATIONS:
                raise PickledError(f"more than {MAX_OPERATIONS} opcodes and copied items")
            reader.take(operation.name, argument)
        return reader.result()
    except PickledError:
        raise
    # `genops` raises `ValueError` for malformed input. The other exceptions mean that an opcode's operand was
    # missing or had the wrong type.
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise PickledError(f"{type(error).__name__}: {error}") from error


class _Reader:
    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self.copied = 0
        """Total number of items in all copied containers."""

    def take(self, name: str, argument: Any) -> None:
        """Execute one opcode."""
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
            _of(list, stack[-1]).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [self._value(), self._value()][::-1] if name == "SETITEM" else self._marked()
            _of(dict, stack[-1]).update(zip(map(_key, items[::2]), items[1::2], strict=True))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise PickledError(f"it contains the opcode {name}")

    def _copy(self, value: Any) -> Any:
        """Return a memoized value. Copy lists and dictionaries, because a malicious pickle could otherwise
        append a list to itself.

        Reject nested lists and dictionaries, because copying them repeatedly could create an exponentially
        large value.
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
        """Pop all values above the topmost mark of the pickle stack, and return them in order."""
        items = []
        while (item := self._stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def result(self) -> object:
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise PickledError("it does not end with a single value")
        return self._stack[0]


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise PickledError(f"found a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _key(key: Any) -> Any:
    if type(key) not in (str, int):
        raise PickledError(f"a dictionary key has the type {type(key).__name__}")
    return key
