"""Description of a failure, for the restart policy, other nodes, events, the status page and reports.

:class:`Cause` is the record. :func:`summarize` reduces a traceback to the type of the exception and where it
was raised. If the exception only reports another one, that one counts: a member of an exception group, or an
exception of a data loader worker or another process, whose traceback is in the text. This module imports no
:mod:`re` or :mod:`typing`, which take milliseconds that would delay the restart after a failure.
"""

from __future__ import annotations

import builtins
import os
import time
from enum import Enum

from elasticrs._engine.job.phrases import printable
from elasticrs._engine.job.value import Record, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


class Permanence(str, Enum):
    """Reason why another attempt would fail in the same way."""

    NON_RETRYABLE = "non_retryable"
    """A worker raised ``NonRetryable``, or its error file contains ``"retryable": false``."""
    EXIT_CODE = "exit_code"
    """A worker exited with one of ``--fatal-exit-codes``."""
    START_ERROR = "start_error"
    """No failed worker could start its program: it is missing or broken, or rejected its arguments."""

    __str__ = str.__str__


class Verdict(str, Enum):
    """Advice on a failed job to the scheduler that has started it."""

    FAILED = "failed"
    PERMANENT = "permanent"
    UNFIT = "unfit"
    """This node cannot run the job, but another node may."""

    __str__ = str.__str__


class Cause(Value):
    """First failure in a rendezvous round. Unknown fields are ``None``.

    Args:
        node: name of the failed worker's node in the rendezvous.
        rank: global rank of the worker; ``None`` if the workers could not be started.
        exitcode: as in ``ProcessFailure``, but ``None`` for a worker that was stopped after an exception.
        message: shortened traceback or other description.
        how: phrase to append to the worker's name; see :func:`.how_it_failed`.
        lines: last lines of the worker's stderr, shortened.
        xids: errors of NVIDIA's driver on that node during the attempt, one line each.
        ground: why a hung worker is blamed, instead of another that missed its deadline (see ``WorkerHung``).
        silence: seconds since the worker's last heartbeat, if it hung.
        step: training step in which the worker hung; -1 if it never sent a step.
        frame: text about the stack frame in which the worker hung, as in ``RankSeen``.
        time_ns: time of the failure, in nanoseconds of the store's wall clock.
        error_ns: maximum error of ``time_ns``.
        exception: qualified name of the type of the worker's uncaught exception.
        place: file and line of the program that raised it, such as ``train.py:88``.
        permanence: value of :class:`Permanence`.
        permanent_rank: global rank of the worker that determined ``permanence``; may differ from ``rank``.
        permanent_sign: that worker's failure, such as ``ValueError at train.py:88`` or ``exit code 3``.
        is_consequence: true if the exception only reports that a peer is lost or silent; otherwise ``None``.
        is_transient: true if the exception only reports a lost connection or a timeout; otherwise ``None``.
        was_killed: true if the worker was killed only by elasticrs, or because the nursery (the process that
            starts the workers) was lost; otherwise ``None``.
        reached: last training step that any worker of the node has completed; ``None`` without heartbeats.
        is_global: true if ``reached`` is counted across restarts (``heartbeat(step, across_restarts=True)``).
        ran: seconds from the start of the workers until the failure, or until the hang began.
        diagnosis: text about the ranks that kept the other ranks waiting, by the evidence of all nodes.
        blamed: ranks to blame for a hang, if not ``rank``, such as ``undecided, candidates: ranks 0, 1``.
    """

    node: str | None = None
    host: str | None = None
    group_rank: int | None = None
    round: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    exitcode: int | None = None
    message: str | None = None
    how: str | None = None
    lines: Sequence[str] = ()
    xids: Sequence[str] = ()
    ground: str | None = None
    silence: float | None = None
    step: int | None = None
    frame: str | None = None
    time_ns: int | None = None
    error_ns: int | None = None
    exception: str | None = None
    place: str | None = None
    permanence: str | None = None
    permanent_rank: int | None = None
    permanent_sign: str | None = None
    is_consequence: bool | None = None
    is_transient: bool | None = None
    was_killed: bool | None = None
    reached: int | None = None
    is_global: bool | None = None
    ran: float | None = None
    diagnosis: str | None = None
    blamed: str | None = None

    def encoded(self) -> dict[str, Any]:
        return {name: value for name, value in self.fields().items() if value is not None and value != ()}

    @staticmethod
    def decoded(fields: Mapping[str, Any]) -> Cause:
        """Create a cause from checked fields. Ignore unknown fields, which another release may send."""
        return Cause(**{name: fields[name] for name in Cause._names if name in fields})


NO_CAUSE = Cause()


# --- times of several nodes ---


class Clock(Value):
    """Wall clock of the machine that hosts the nodes' common store. ``offset_ns`` is its time minus that of
    this node's wall clock. ``error_ns`` is the possible error of this offset; ``None`` if it is unknown.
    """

    offset_ns: int = 0
    error_ns: int | None = 0

    def from_monotonic(self, ns: int) -> int:
        return ns + _wall_minus_monotonic() + self.offset_ns

    def to_monotonic(self, ns: int) -> int:
        return ns - self.offset_ns - _wall_minus_monotonic()


def _wall_minus_monotonic() -> int:
    """Return wall clock minus monotonic clock, in ns. Of three measurements, the fastest is most precise."""
    found = []
    for _ in range(3):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        found.append((after - before, wall - (before + after) // 2))
    return min(found)[1]


# --- summaries of tracebacks ---


LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
"""Path fragments that identify files outside the user's own code."""

OWN_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + "/"
"""Start of the paths of the files of this package, which may be installed from a clone."""

_LIMIT = 300
"""Maximum number of characters of the exception's text."""
_HEAD, _TAIL = 1 << 14, 1 << 16
"""Number of characters that are used from the start and from the end of a long text."""
_MAX_KINDS = 4
_MAX_DEPTH = 10
"""Maximum nesting depth of tracebacks inside the texts of other tracebacks."""

_CAUSED = "The above exception was the direct cause of the following exception:"
_CHAINED = (_CAUSED, "During handling of the above exception, another exception occurred:")
_BEGINS = ("Traceback (most recent call last)", "Original Traceback (most recent call last)")
_REMOTE = 'RemoteTraceback: \n"""'
"""Text that precedes the traceback of a process in a process pool."""


class Summary(Record):
    """Summary of an exception. ``said`` is the type and the text's first line. ``place``, such as
    ``train.py:41``, is in the user's code. ``more`` counts other members of an exception group.
    """

    said: str
    place: str | None
    exception: str | None
    more: int = 0


def headline(text: str, more: int = 0) -> str | None:
    """Return an exception and its place, such as ``OSError: a.bin (train.py:41)``; ``None`` for no text.
    The place is the innermost frame outside of libraries, or else the innermost. ``more`` is the number of
    other members of the exception group.
    """
    found = summarize(text)
    if found is None:
        return None
    place = f" ({found.place})" if found.place else ""
    more = more or found.more
    return f"{found.said}{place}{f', and {more} more' if more else ''}"


def shortened(text: str, limit: int) -> str:
    """Return the end of a text, or only the exception and its place if the end of a traceback lacks them."""
    if len(text) <= limit:
        return text
    end = "…" + text[-limit + 1 :]
    told, kept = summarize(text), summarize(end)
    if told is None or told.exception is None or told.place is None:
        return end
    if kept is not None and (kept.said, kept.place) == (told.said, told.place):
        return end
    path, _, number = told.place.rpartition(":")
    return f'…\n  File "{path}", line {number}\n{told.said}'


def summarize(text: str) -> Summary | None:
    """Summarize (the end of) a traceback or any other message; ``None`` for an empty text.
    The result does not depend on the order of a group's members, which may differ between attempts.
    """
    if len(text) > _HEAD + _TAIL:
        text = f"{text[:_HEAD]}\n{text[-_TAIL:]}"
    return _summarize(text, _MAX_DEPTH)


def _summarize(text: str, depth: int, *, is_exception: bool = False) -> Summary | None:
    """Summarize a text that, with ``is_exception``, describes an exception even without a traceback."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    if depth and _is_end_of_group(lines[-1]):
        header, members, more = _members(lines)
        told = (_summarize("\n".join(each), depth - 1, is_exception=True) for each in members)
        found = [each for each in told if each is not None]
        if found:
            return _of_group(found, _own_place(_frames(header)), more + sum(each.more for each in found))
    outer = _of_traceback(lines, is_exception)
    remote = _remote(text)
    if depth and _own_place(_frames(remote.splitlines())) is not None:
        inner = _summarize(remote, depth - 1)
        outer.place = outer.place if inner is None or inner.place is None else inner.place
    return outer


def _remote(text: str) -> str:
    """Return the traceback of another process whose exception directly caused the text's last exception."""
    before, found, own = text.rpartition(f'\n"""\n\n{_CAUSED}\n')
    if not found or any(line in _CHAINED for line in own.splitlines()):
        return ""
    return before.rpartition(_REMOTE)[2] if _REMOTE in before else ""


def _of_traceback(lines: Sequence[str], is_exception: bool) -> Summary:
    begins = [number for number, line in enumerate(lines) if line.startswith(_BEGINS)]
    block = lines[begins[-1] + 1 if begins else 0 :]
    frames = _frames(block)
    is_traceback = bool(is_exception or begins or frames)
    # Use the first line of an exception's text, and the last line of any other message.
    at = next((n for n, line in enumerate(block) if not line.startswith((" ", "…"))), None)
    if not is_traceback or at is None:
        said, name = lines[-1].strip(), None
    else:
        said, name = block[at].strip(), _type(block[at])
        if name is not None and said == f"{name}:" and at + 1 < len(block):
            # The exception's text begins with a newline, so add its next line.
            said = f"{said} {block[at + 1].strip()}"
    place = _own_place(frames)
    if place is None and frames:
        # The last traceback has only library code. The exception's message may quote it, so search the
        # traceback of the exception itself, too.
        since = max((n for n, line in enumerate(lines) if line in _CHAINED), default=-1) + 1
        place = _own_place(_frames(lines[since:])) or _place(frames[-1])
    return Summary(printable(said, _LIMIT), place, None if name is None else _qualified(name))


def _of_group(members: Sequence[Summary], place: str | None, more: int) -> Summary:
    """Describe an exception group (raised at ``place``) by one member, chosen regardless of their order."""
    told = min(members, key=lambda each: (each.exception or "", each.place or ""))
    kinds = sorted({each.exception or "" for each in members} - {""})
    exception = kinds[0] if len(kinds) == 1 else None
    if len(kinds) > 1:
        names = ", ".join(kind.rpartition(".")[2] for kind in kinds[:_MAX_KINDS])
        exception = f"builtins.ExceptionGroup[{names}]"
    return Summary(told.said, told.place or place, exception, len(members) - 1 + more)


def _members(lines: Sequence[str]) -> tuple[list[str], list[list[str]], int]:
    """Return the lines above a group's members, the lines of each member that is not itself a group, and the
    number of members that Python has omitted. Remove the border that Python draws beside them.
    """
    sections: list[list[str]] = [[]]
    more = 0
    for line in lines:
        bare = line.lstrip(" ")
        if bare.startswith("|"):
            sections[-1].append(bare[2:])
        elif bare.startswith("+-+--") and len(sections) > 1:
            # Discard the header of an inner group.
            sections[-1] = []
        elif bare.startswith("+-") and not _is_end_of_group(line):
            sections.append([])
    leaves = []
    for section in sections[1:] or sections:
        left_out = _left_out(section)
        more += left_out
        if section and not left_out:
            leaves.append(section)
    return sections[0], leaves, more


def _left_out(section: Sequence[str]) -> int:
    """Return the number in a line such as ``and 3 more exceptions``."""
    words = section[0].split() if len(section) == 1 else []
    is_number = len(words) == 4 and words[0] == "and" and words[2] == "more" and words[1].isdecimal()
    return int(words[1]) if is_number else 0


def _is_end_of_group(line: str) -> bool:
    """Return true for a plus sign and a row of minus signs, with which Python ends an exception group."""
    bare = line.lstrip(" ")
    return len(bare) > 8 and bare.rstrip("-") == "+"


def _frames(lines: Sequence[str]) -> list[tuple[str, str]]:
    return [frame for frame in map(_frame, lines) if frame is not None]


def _frame(line: str) -> tuple[str, str] | None:
    if not line.startswith('  File "'):
        return None
    path, found, rest = line[len('  File "') :].rpartition('", line ')
    return (path, rest.partition(",")[0]) if found else None


def _own_place(frames: Sequence[tuple[str, str]]) -> str | None:
    for frame in reversed(frames):
        path = frame[0]
        if not path.startswith(OWN_PACKAGE) and not any(part in path for part in LIBRARIES):
            return _place(frame)
    return None


def _place(frame: tuple[str, str]) -> str:
    return f"{printable(os.path.basename(frame[0]), _LIMIT)}:{frame[1]}"


def _type(line: str) -> str | None:
    name = line.partition(":")[0].strip()
    parts = name.split(".")
    return name if all(part.isidentifier() or part == "<locals>" for part in parts) else None


def _qualified(name: str) -> str:
    """Add the module, which tracebacks omit for built-in types and types of the script itself."""
    if "." in name:
        return name
    return f"builtins.{name}" if isinstance(getattr(builtins, name, None), type) else f"__main__.{name}"
