"""Decode JSON that another process wrote, and validate every field before use.

All functions are pure. A check is a function that takes a value and returns true if the value is valid.
"""

from __future__ import annotations

import json
import math

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any, TypeAlias

    Check: TypeAlias = Callable[[Any], bool]

MOST = 2**53 - 1
"""Largest rank, round number or count. All JSON implementations represent it exactly."""

LATEST = 2**63 - 1
"""Latest time, in nanoseconds."""

MAX_NAME = 1024
"""Maximum number of characters in a name or an address, so that a table of 99 nodes fits into one write."""

_SHOWN = 40
"""Number of characters of an invalid value that are shown in an error message."""


class DamagedError(ValueError):
    """Raised if a record is damaged, or was not written by elasticrs. The message describes the problem."""


def decode(value: bytes) -> Any:
    """Decode JSON.

    Raises:
        DamagedError: the bytes are not JSON, or contain a number such as NaN that JSON does not have.
    """
    try:
        return json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"not JSON ({type(error).__name__})") from error


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _is_whole(low: int | None, high: int | None) -> Check:
    return lambda value: (
        type(value) is int and (low is None or low <= value) and (high is None or value <= high)
    )


def one_of(*values: str) -> Check:
    """Return a check that accepts exactly these strings."""
    return lambda value: isinstance(value, str) and value in values


def row_of(*checks: Check) -> Check:
    """Return a check that accepts a list in which each value passes the check at the same position in
    ``checks``. The list and ``checks`` must have the same length.
    """
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(checks)
        and all(check(each) for check, each in zip(checks, value, strict=True))
    )


def list_of(check: Check, most: int) -> Check:
    """Return a check for a list of at most ``most`` values that all pass ``check``."""
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(check, value))


def optional(check: Check) -> Check:
    """Return a check that accepts null or a value that passes ``check``."""
    return lambda value: value is None or check(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NAME


def _is_address(value: Any) -> bool:
    # Require printable text, because addresses are put into environment variables, which cannot contain NUL
    # or unpaired surrogates.
    return _is_name(value) and value.isprintable()


WHOLE = _is_whole(-MOST, MOST)
INT = _is_whole(None, None)
COUNT = _is_whole(0, MOST)
POSITIVE = _is_whole(1, MOST)
PORT = _is_whole(0, 65535)
TIME = _is_whole(0, LATEST)
TEXT, NAME, ADDRESS = _is_text, _is_name, _is_address
FLAG, ANY = (lambda value: isinstance(value, bool)), (lambda _: True)


def _is_span(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= MOST


SPAN = _is_span
CAUSE: dict[str, Check] = {
    **dict.fromkeys(("node", "host", "message", "message_kind", "frame", "ground"), TEXT),
    **dict.fromkeys(("exception", "place", "permanence", "permanent_sign", "diagnosis", "blamed"), TEXT),
    **dict.fromkeys(("group_rank", "signal", "step", "reached"), WHOLE),
    **dict.fromkeys(("round", "rank", "local_rank", "pid", "permanent_rank"), COUNT),
    **dict.fromkeys(("time_ns", "error_ns"), TIME),
    "exitcode": optional(WHOLE),
    **dict.fromkeys(("is_consequence", "is_transient", "is_global", "was_killed"), FLAG),
    **dict.fromkeys(("silence", "ran"), _is_span),
    "lines": list_of(TEXT, 1000),
    "xids": list_of(TEXT, 1000),
}


def fields(record: Any, checks: Mapping[str, Check], required: Iterable[str]) -> dict[str, Any]:
    """Check an object and return its fields that are not null. ``checks`` lists every field that the object
    may have.

    Raises:
        DamagedError: the value is not an object, has an unknown field, lacks a required field, or has a field
            with an invalid value.
    """
    if not isinstance(record, dict):
        raise DamagedError(f"{_shown(record)} is not an object")
    found = {name: value for name, value in record.items() if value is not None}
    for name, value in found.items():
        if name not in checks or not checks[name](value):
            raise DamagedError(f"{_shown(name)} is {_shown(value)}")
    missing = [name for name in required if name not in found]
    if missing:
        raise DamagedError(f"it has no {missing[0]}")
    return found


def row(record: Any, checks: Sequence[Check]) -> list[Any]:
    """Return ``record`` if it is a list in which each value passes the check at the same position in
    ``checks``.

    Raises:
        DamagedError: the value is not a list of that kind.
    """
    if not row_of(*checks)(record):
        raise DamagedError(f"{_shown(record)} is not a list of the expected values")
    found: list[Any] = record
    return found


def cause(record: Any) -> dict[str, Any] | None:
    """Return the valid fields of a failure's cause; ``None`` if the cause is not an object.

    Invalid fields are dropped and not treated as an error, because a cause only decides which failure is
    reported first. Unknown fields are kept.
    """
    if not isinstance(record, dict):
        return None
    return {name: value for name, value in record.items() if name not in CAUSE or CAUSE[name](value)}


def _shown(value: Any) -> str:
    text = f"{type(value).__name__}" if isinstance(value, (dict, list)) else ascii(value)[: _SHOWN + 1]
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
