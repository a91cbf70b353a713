"""Parse the options of the restart policy: durations, budgets, delays, and lists of exit codes."""

from __future__ import annotations

from elasticrs._engine.job.value import Value

MAX_IN_WINDOW = 100
"""Maximum number of restarts that a user may allow in a window. There is a limit, because the times of these
restarts are kept in a record of limited size.
"""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = 30 * 86400.0
"""Maximum duration in seconds: 30 days."""


class MaxRestarts(int):
    """Maximum number of restarts, within ``window`` seconds or (``None``) in the whole job.

    A subclass of ``int``, because programs expect an ``int`` as in torchrun.
    """

    window: float | None = None

    @staticmethod
    def parse(text: str) -> MaxRestarts:
        number, slash, window = text.partition("/")
        if not (number.isascii() and number.isdecimal()) or (slash and not window):
            raise ValueError("a whole number, 0 or more, or a number per duration such as 3/1h")
        found = MaxRestarts(number)
        if slash:
            found.window = duration(window)
            if not 1 <= found <= MAX_IN_WINDOW:
                raise ValueError(f"1 to {MAX_IN_WINDOW} restarts per duration")
        return found


def in_seconds(text: str) -> float:
    """Parse a duration with or without a unit, such as ``90``, ``1.5s``, ``10m``, ``1h`` or ``2d``."""
    unit = _UNITS.get(text[-1:])
    return float(text[:-1] if unit else text) * (unit or 1.0)


def duration(text: str) -> float:
    """Parse a duration of at most 30 days, and return it in seconds."""
    expected = "a duration such as 30s, 10m, 1h or 2d, of at most 30 days"
    try:
        value = in_seconds(text)
    except ValueError:
        raise ValueError(expected) from None
    if not 0 < value <= _LONGEST:
        raise ValueError(expected)
    return value


def delays(text: str) -> tuple[float, float]:
    """Parse ``0``, a duration, or ``FIRST..LONGEST``. Return the first and the longest delay in seconds."""
    if text == "0":
        return 0.0, 0.0
    first, dots, longest = text.partition("..")
    try:
        least = duration(first)
        most = duration(longest) if dots else least
    except ValueError as error:
        raise ValueError(f"{error}, or FIRST..LONGEST such as 1s..5m") from None
    if most < least:
        raise ValueError("FIRST..LONGEST, where LONGEST is not shorter than FIRST")
    return least, most


def exit_codes(text: str) -> frozenset[int]:
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        low, dash, high = part.partition("-")
        codes = (low, high if dash else low)
        if not all(code.isascii() and code.isdecimal() and 1 <= int(code) <= 255 for code in codes):
            raise ValueError("exit codes from 1 to 255, such as 3,40-49")
        span = range(int(codes[0]), int(codes[1]) + 1)
        if not span or not found.isdisjoint(span):
            raise ValueError(f"exit codes in ascending ranges that do not overlap (not {part})")
        found.update(span)
    return frozenset(found)


class ExitCodes(Value):
    """Exit codes of the launcher for a failed job; see ``exit_codes`` in :class:`.WorkerSettings`."""

    kind: str = "torchrun"
    permanent: int = 93
    unfit: int = 193

    @staticmethod
    def parse(text: str) -> ExitCodes:
        kind, colon, numbers = text.partition(":")
        expected = "torchrun, worker, verdict or verdict:PERMANENT,UNFIT (two codes from 3 to 255)"
        if kind not in ("torchrun", "worker", "verdict") or (colon and kind != "verdict"):
            raise ValueError(expected)
        if not colon:
            return ExitCodes(kind)
        codes = numbers.split(",")
        if len(codes) != 2 or not all(code.isascii() and code.isdecimal() for code in codes):
            raise ValueError(expected)
        permanent, unfit = map(int, codes)
        # 0, 1 and 2 already mean success, failure and a usage error.
        if permanent == unfit or not all(3 <= code <= 255 for code in (permanent, unfit)):
            raise ValueError(expected)
        return ExitCodes(kind, permanent, unfit)


BUILT_IN_SOURCES = ("nvml",)


class HealthSource(Value):
    """A node health check: a built-in source, or a user's program and its arguments (``words``)."""

    title: str
    words: tuple[str, ...]
    built_in: str | None = None

    @staticmethod
    def parse(text: str) -> HealthSource:
        name, colon, _ = text.strip().partition(":")
        if name in ("gpud", "nvhcd"):
            raise ValueError(
                f"a command, because the source {name} is gone: copy contrib/node-checks/{name}.sh from the"
                f" project, and pass 'bash /PATH/{name}.sh'"
            )
        if name not in BUILT_IN_SOURCES:
            return HealthSource("the node check", tuple(command(text)))
        if colon:
            raise ValueError(name)
        return HealthSource(name, (), name)


def similar_source(word: str) -> str | None:
    import difflib

    near = difflib.get_close_matches(word.partition(":")[0].lower(), BUILT_IN_SOURCES, 1, 0.5)
    return near[0] if near else None


def report_path(text: str) -> str:
    """Return the path. The text may be a path or ``file:PATH``, as for events."""
    path = text.removeprefix("file:")
    if not path:
        raise ValueError("PATH or file:PATH")
    return path


def command(text: str) -> list[str]:
    import shlex

    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if not words:
        raise ValueError("a program and its arguments, with closed quotes")
    return words
