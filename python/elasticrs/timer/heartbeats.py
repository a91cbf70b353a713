"""Signs of life of a worker, for ``--hang-timeout``.

The agent passes each worker a page of shared memory, and says so in ``ELASTICRS_HEARTBEAT``. A heartbeat is
two or three stores into it: no system call, nobody is woken, nothing can block. The agent reads the page when
a limit has passed. Its layout is in ``crates/elasticrs-core/src/timer/pages.rs``. Elsewhere, and in children
of the worker, heartbeats go nowhere.
"""

from __future__ import annotations

import os
from time import monotonic_ns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Protocol

__all__ = ["Section", "heartbeat"]

_SIZE = 4096
# By words of 8 bytes.
_PID, _COUNT, _STEP, _LIMIT, _EXIT, _TIMES = 0, 1, 2, 3, 4, 64
_NAME = slice(64, 128)  # By bytes.
_LAST = 127
_UNLIMITED = 2**64 - 1

_words: memoryview | None = None
_automatic: memoryview | None = None
"""What the steps of optimizers write into, until the program gives a heartbeat of its own."""
_count = 0
_mark = 1
"""The lowest bit of a time: 1 when it ends a step, 0 when it ends a part of a section."""


def _heartbeat(step: int | None = None) -> None:
    """Tell the agent that this worker makes progress; once for each training step, say.

    From the first call on, a worker that does not call again within ``--hang-timeout`` has failed, and the
    group restarts within its budget. Costs well below a microsecond. For parts that take longer, see
    :class:`Section` (``heartbeat.section``).

    Args:
        step: the number of the step that begins, 0 or more, for the report; -1: before the first one.

    Raises:
        ValueError: a negative or enormous step.
        TypeError: a step that is not a whole number.
    """
    global _count  # noqa: PLW0603 -- kept here, as reading it from the page costs more
    words = _words or _attach()
    words[_TIMES + (_count & _LAST)] = monotonic_ns() & -2 | _mark
    _count += 1
    words[_COUNT] = _count
    if step is not None:
        words[_STEP] = step + 1


class Section:
    """A part of the program with a limit of its own: ``with heartbeat.section("checkpoint", limit=600): …``

    The limit counts from entering it, or from the last heartbeat in it. It is for the whole process,
    whichever thread enters. Sections can be nested; then the innermost one counts. One in a worker that has
    not given a heartbeat yet is its first.

    Args:
        name: for the report; 63 bytes of it are kept.
        limit: seconds, more than 0; ``None``: it may take any time.

    Raises:
        ValueError: a limit that is not above 0.
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
        # What comes before belongs to a step, or to the section around.
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
        def __call__(self, step: int | None = None) -> None: ...
        def section(self, name: str, limit: float | None) -> Section: ...

    heartbeat: _Heartbeat
else:
    heartbeat = _heartbeat
    heartbeat.__name__ = heartbeat.__qualname__ = "heartbeat"
    heartbeat.section = Section


def automatic_heartbeat(step: int | None) -> None:
    """Give a heartbeat, as :func:`heartbeat`, unless the program has given one itself, or this is a child of
    the worker.
    """
    global _automatic, _count  # noqa: PLW0603 -- as in `_heartbeat`
    if _words is not None:
        return
    words = _automatic
    if words is None:
        words = _automatic = _take_page()
    # The stores of `_heartbeat`, which calls nothing for them.
    words[_TIMES + (_count & _LAST)] = monotonic_ns() | 1
    _count += 1
    words[_COUNT] = _count
    if step is not None:
        words[_STEP] = step + 1


def heartbeat_unless_given(before: int) -> int:
    """Give a heartbeat if there have been no more than ``before``; return how many there have been now."""
    if _count == before:
        _heartbeat()
    return _count


def _attach() -> memoryview:
    global _words  # noqa: PLW0603 -- the page of this process
    _words = words = _take_page()
    # Steps that were counted by themselves are not the program's.
    words[_STEP] = 0
    return words


def _take_page() -> memoryview:
    words = _page(os.environ.get("ELASTICRS_HEARTBEAT", ""))
    if words is None:
        words = memoryview(bytearray(_SIZE)).cast("Q")
    else:
        from elasticrs._worker.stacks import answer_with_stacks

        answer_with_stacks()
        os.register_at_fork(after_in_child=_detach)
        if _automatic is None:
            _notice_exit()
    return words


def _notice_exit() -> None:
    """Call :func:`_begin_exit` when the main program has returned.

    Do not use ``atexit``, because its callbacks run only after all background threads have finished.
    """
    from threading import _register_atexit  # type: ignore[attr-defined]

    try:
        _register_atexit(_begin_exit)
    except RuntimeError:
        return  # The main program has already returned, so the time limit for a step stays in force.


def _begin_exit() -> None:
    """Store the time at which the main program returned.

    From then on the time limit for a step does not apply. It applies again if another heartbeat follows,
    because then a background thread is still training.
    """
    global _count  # noqa: PLW0603 -- as in `_heartbeat`
    words = _words or _automatic
    if words is not None:
        # In a time, a set lowest bit marks the end of a step. Clear it, because no step ends here.
        at = monotonic_ns() & -2
        words[_TIMES + (_count & _LAST)] = at
        _count += 1
        words[_COUNT] = _count
        words[_EXIT] = at


def _detach() -> None:
    """What a child does is no sign of life of its parent."""
    global _words  # noqa: PLW0603 -- as above
    _words = memoryview(bytearray(_SIZE)).cast("Q")


def start_afresh() -> None:
    """Forget the page, and what was counted: for a forked worker, which has one of its own."""
    global _words, _automatic, _count, _mark
    _words, _automatic, _count, _mark = None, None, 0, 1


def _page(variable: str) -> memoryview | None:
    """The page that the agent has passed, unless somebody closed it, or it is another process's."""
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
