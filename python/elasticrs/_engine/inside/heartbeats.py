"""Send a worker's heartbeats, which the agent checks if ``--hang-timeout`` is set.

A heartbeat writes numbers to a shared page, without a system call. The page's layout is in
``crates/elasticrs-core/src/timer/pages.rs``. Without a page, and in child processes, a heartbeat
has no effect.
"""

from __future__ import annotations

import os
import sys
from time import monotonic_ns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Protocol

__all__ = ["Section", "heartbeat"]

_SIZE = 4096
# Offsets in words of 8 bytes.
_PID, _COUNT, _STEP, _LIMIT, _EXIT, _TIMES = 0, 1, 2, 3, 4, 64
_NAME = slice(64, 128)  # Offsets in bytes.
_LAST = 127
_UNLIMITED = 2**64 - 1
_GLOBAL = 2**63
"""Bit of the step word in the shared page. It is set if the program's step numbers go on after a restart."""
_AUTOMATIC = 2**62
"""Bit of the step word in the shared page, set if optimizer steps are counted automatically."""

_words: memoryview | None = None
_automatic: memoryview | None = None
"""Page for the automatic heartbeats of optimizer steps, used until the program sends its own heartbeats."""
_count_step: Callable[[], None] | None = None
"""Function that counts each heartbeat with a step number as a training step; ``None`` if none is counted."""
_count = 0
_mark = 1
"""Lowest bit of a heartbeat's timestamp: 1 if the heartbeat ends a step, 0 if it ends a part of a section."""


def _heartbeat(step: int | None = None, across_restarts: bool = False) -> None:
    """Report progress of this worker to the agent, for example once in each training step.

    After its first heartbeat, a worker is considered failed if it sends no further heartbeat within
    ``--hang-timeout``. The group is then restarted if its restart budget allows. A call takes much less than
    a microsecond. For parts of the program that take longer, see :class:`Section` (``heartbeat.section``).

    Args:
        step: number of the step that starts, 0 or more, shown in reports. -1 means that no step has started
            yet.
        across_restarts: true if ``step`` counts all steps of the training, so that it continues from the
            checkpoint after a restart. The restart policy then uses it to decide whether the training makes
            progress. False if ``step`` may start again from 0 in a new attempt or epoch.

    Raises:
        ValueError: the step is negative or too large.
        TypeError: the step is not an integer.
    """
    global _count  # noqa: PLW0603 -- reading the count from the page is slower
    words = _words or _attach()
    words[_TIMES + (_count & _LAST)] = monotonic_ns() & -2 | _mark
    _count += 1
    words[_COUNT] = _count
    if step is not None:
        words[_STEP] = step + 1 | _GLOBAL if across_restarts else step + 1
        if _count_step is not None and step >= 0:
            _count_step()


class Section:
    """Part of the program that has its own time limit: ``with heartbeat.section("checkpoint", limit=600): …``

    The limit starts when the section is entered, and again with each heartbeat inside the section. It applies
    to the whole process, whichever thread enters the section. If sections are nested, the limit of the
    innermost one applies. Entering a section counts as a heartbeat.

    Args:
        name: name of the section in reports, cut to 63 bytes.
        limit: time limit in seconds, more than 0; ``None`` for no limit.

    Raises:
        ValueError: the limit is not above 0.
    """

    __slots__ = ("_limit", "_name", "_outer")

    def __init__(self, name: str, limit: float | None) -> None:
        if limit is not None and not limit > 0:
            raise ValueError(f"the limit of a section must be more than 0 seconds, got {limit!r}")
        self._limit = _UNLIMITED if limit is None else int(min(limit, 1e9) * 1e9) or 1
        self._name = name.encode("utf-8", "replace")[:63].ljust(64, b"\0")
        self._outer: list[tuple[int, bytes, int]] = []

    def __enter__(self) -> None:
        global _mark  # noqa: PLW0603 -- as in `_heartbeat`
        words = _words or _attach()
        self._outer.append((words[_LIMIT], bytes(words.cast("B")[_NAME]), _mark))
        # The time until this heartbeat belongs to the enclosing step or section, not to this one.
        _heartbeat()
        _mark = 0
        words.cast("B")[_NAME] = self._name
        words[_LIMIT] = self._limit

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _mark
        words = _words or _attach()
        _heartbeat()
        words[_LIMIT], name, _mark = self._outer.pop()
        words.cast("B")[_NAME] = name


if TYPE_CHECKING:

    class _Heartbeat(Protocol):
        def __call__(self, step: int | None = None, across_restarts: bool = False) -> None: ...
        def section(self, name: str, limit: float | None) -> Section: ...

    heartbeat: _Heartbeat
else:
    heartbeat = _heartbeat
    heartbeat.__name__ = heartbeat.__qualname__ = "heartbeat"
    heartbeat.section = Section


def automatic_heartbeat(step: int | None) -> None:
    """Send a heartbeat, unless the program sends its own, or this is a forked child of the worker."""
    global _automatic, _count  # noqa: PLW0603 -- as in `_heartbeat`
    if _words is not None:
        return
    words = _automatic
    if words is None:
        words = _automatic = _take_page()
    # Write the same numbers as `_heartbeat`, but without the cost of calling it.
    words[_TIMES + (_count & _LAST)] = monotonic_ns() | 1
    _count += 1
    words[_COUNT] = _count
    if step is not None:
        words[_STEP] = step + 1 | _AUTOMATIC


def heartbeat_unless_given(before: int) -> int:
    """Send a heartbeat if the heartbeat count is still ``before``. Return the new count."""
    if _count == before:
        _heartbeat()
    return _count


def _attach() -> memoryview:
    global _words, _count_step  # noqa: PLW0603 -- one page (of shared memory) for each process
    _words = words = _take_page()
    # From now on, the program reports its own step numbers, so drop the count of optimizer steps.
    words[_STEP] = 0
    if "ELASTICRS_KEEP" in os.environ:
        from elasticrs._engine.inside.boundary import follow_heartbeats

        _count_step = follow_heartbeats(_count_no_steps)
    return words


def _count_no_steps() -> None:
    global _count_step  # noqa: PLW0603 -- one for each process
    _count_step = None


def _take_page() -> memoryview:
    words = _page(os.environ.get("ELASTICRS_HEARTBEAT", ""))
    if words is None:
        words = memoryview(bytearray(_SIZE)).cast("Q")
    else:
        from elasticrs._engine.inside import flight

        flight.answer_with_stacks()
        if "torch" in sys.modules:
            flight.answer_with_record()
        os.register_at_fork(after_in_child=_detach)
        if _automatic is None:
            _notice_exit()
    return words


def _notice_exit() -> None:
    """Have :func:`_begin_exit` called when the main program returns. ``atexit`` waits for threads first."""
    from threading import _register_atexit  # type: ignore[attr-defined]

    try:
        _register_atexit(_begin_exit)
    except RuntimeError:
        # It is too late: the main program has returned. So the time limit for a step applies to the exit.
        return


def _begin_exit() -> None:
    """Record that the main program has returned. From now on, the time limit for training steps applies only
    if another thread sends heartbeats.
    """
    global _count  # noqa: PLW0603 -- as in `_heartbeat`
    words = _words or _automatic
    if words is not None:
        # Clear the lowest bit, because a set bit would mark the end of a training step.
        at = monotonic_ns() & -2
        words[_TIMES + (_count & _LAST)] = at
        _count += 1
        words[_COUNT] = _count
        words[_EXIT] = at


def _detach() -> None:
    global _words  # noqa: PLW0603 -- as above
    _words = memoryview(bytearray(_SIZE)).cast("Q")


def start_afresh() -> None:
    """Discard inherited heartbeat state, because a forked worker shares a page of its own with the agent."""
    global _words, _automatic, _count_step, _count, _mark
    _words, _automatic, _count_step, _count, _mark = None, None, None, 0, 1


def _page(variable: str) -> memoryview | None:
    """Map the page shared with the agent; ``None`` if there is no valid page, or another process uses it."""
    from mmap import mmap

    try:
        fd, device, inode = map(int, variable.split(":"))
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino, found.st_size) != (device, inode, _SIZE):
            return None
        words = memoryview(mmap(fd, _SIZE)).cast("Q")
    except (ValueError, OSError):
        return None
    owner, own = words[_PID], os.getpid()
    if owner not in (0, own) and os.path.exists(f"/proc/{owner}"):
        return None
    words[_PID] = own
    return words


def beat_with_steps(optimizers: object) -> None:
    """Count the steps of torch's optimizers, and send a heartbeat to the agent after each step if the agent
    watches heartbeats. Also start the thread that writes torch's logs of collectives when the agent asks.
    """
    from elasticrs._engine.inside.boundary import follow_steps
    from elasticrs._engine.inside.flight import answer_with_record

    # Start the thread now, because the first collective can hang before the first step.
    answer_with_record()
    is_watched = "ELASTICRS_HEARTBEAT" in os.environ and os.environ.get("ELASTICRS_AUTO_HEARTBEAT") != "0"
    follow_steps(optimizers, automatic_heartbeat if is_watched else None)
