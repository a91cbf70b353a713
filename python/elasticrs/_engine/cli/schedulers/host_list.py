"""Expand Slurm host lists such as ``node[1-3,7]-ib[0-1],login``. Slurm's own tool for this, ``scontrol``, is
often missing in containers.
"""

from __future__ import annotations

from itertools import islice

from elasticrs._engine.cli.schedulers.place import number_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_ALLOWED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_[],")
MOST = 1 << 20
"""Maximum number of hosts in a list. Without this limit, a damaged list such as ``n[1-99999999999]`` would
exhaust memory.
"""


def expand(text: str) -> list[str]:
    """Expand a host list into host names, in the order of the list.

    If a name has several bracketed parts, the result contains all combinations, and the last part varies
    fastest. Numbers are padded with zeros to the width of the first number in their range, so ``n[08-11]``
    starts with ``n08``.

    Args:
        text: comma-separated names. A name may have brackets with comma-separated numbers and ranges.

    Raises:
        ValueError: the text is not a valid host list, or it has more than :data:`MOST` hosts. The message
            says what was expected.
    """
    found: list[str] = []
    for entry in _entries(text):
        if not _ALLOWED.issuperset(entry):
            raise ValueError("a host list whose names have only letters, digits, '.', '-' and '_'")
        names = [""]
        for number, part in enumerate(_parts(entry)):
            choices = list(islice(_numbers(part), MOST + 1)) if number % 2 else [part]
            if len(found) + len(names) * len(choices) > MOST:
                raise ValueError(f"a host list with at most {MOST} hosts")
            names = [name + choice for name in names for choice in choices]
        found += names
    return found


def _entries(text: str) -> Iterator[str]:
    """Split a host list at commas outside brackets, and yield the parts."""
    depth = start = 0
    for index, character in enumerate(text + ","):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == "," and depth == 0:
            if not text[start:index]:
                raise ValueError("a host list without empty names")
            yield text[start:index]
            start = index + 1
        if depth not in (0, 1):
            raise ValueError("a host list with closed brackets that are not nested")
    if depth:
        raise ValueError("a host list with closed brackets")


def _parts(entry: str) -> list[str]:
    """Split a name at its brackets. The parts with odd indexes are the contents of the brackets."""
    return entry.replace("]", "[").split("[")


def _numbers(text: str) -> Iterator[str]:
    for span in text.split(","):
        low, dash, high = span.partition("-")
        first, last = number_in(low), number_in(high if dash else low)
        if first is None or last is None:
            raise ValueError("numbers and ranges in the brackets of a host list")
        if first > last:
            raise ValueError("ascending ranges in the brackets of a host list")
        if last - first >= MOST:
            raise ValueError(f"a host list with at most {MOST} hosts")
        for number in range(first, last + 1):
            yield str(number).zfill(len(low))
