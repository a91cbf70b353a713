"""Signal handlers that do something at once, but not in the middle of something else.

An exception of a handler would lose the event that is being taken in. So while the main thread waits for
events (:func:`waiting`), what a handler wants done is kept until the event has been recorded; and while
something is started or closed (:func:`held`), until that waits or is done. Children made by ``fork`` begin
without all that.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from elasticrs.forks import is_undone, undo_in_children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from types import FrameType
    from typing import TypeAlias, TypeVar

    _T = TypeVar("_T")
    Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | signal.Handlers | None

_waits: list[Callable[[], None]] = []
"""What ends the wait of the main thread at this moment; several when a signal handler waits as well."""

_holds: list[bool] = []
_kept: list[Callable[[], object]] = []


def _begin_anew() -> None:
    # Not emptied: a child may return through the very frames that have put something in.
    global _waits, _holds, _kept
    _waits, _holds, _kept = [], [], []


os.register_at_fork(after_in_child=_begin_anew)


def when_safe(call: Callable[[], object]) -> None:
    """Call this now, or as soon as nothing is lost if it raises. For signal handlers."""
    _kept.append(call)
    if _waits:
        _waits[-1]()
    elif not _holds:
        call_kept()


def raise_when_safe(error: BaseException) -> None:
    """Raise an exception now, or as soon as nothing is lost by it."""

    def raise_it() -> None:
        raise error

    when_safe(raise_it)


def call_kept() -> None:
    """Call what was kept. The first exception is raised; others say no more."""
    if not _kept or threading.current_thread() is not threading.main_thread():
        return
    raised: BaseException | None = None
    while _kept:
        try:
            _kept.pop(0)()
        except BaseException as error:  # noqa: PERF203 -- all are called
            raised = raised or error
    if raised is not None:
        raise raised


@contextmanager
def waiting(end: Callable[[], None]) -> Iterator[None]:
    """Wait for an event and record it in this block; what handlers want is done at its end. A handler calls
    ``end``.
    """
    with _block(_waits, end, is_wait=True):
        if _kept and threading.current_thread() is threading.main_thread():
            # Its handler ran before there was a wait that it could end.
            end()
        yield


def held() -> AbstractContextManager[None]:
    """Keep what handlers want until the block ends or this thread waits in it."""
    return _block(_holds, True, is_wait=False)


@contextmanager
def _block(blocks: list[_T], block: _T, *, is_wait: bool) -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        blocks.append(block)
    try:
        yield
    finally:
        if is_main:
            blocks.pop()
        if is_wait or not (_holds or _waits):
            call_kept()


class CaughtSignals:
    """Handlers that several users have installed. What was there before returns with the last of them, and
    in children made by ``fork``. Main thread only.
    """

    def __init__(self) -> None:
        self._before: dict[int, Handler] = {}
        self._ours: dict[int, Handler] = {}
        self._users: dict[int, int] = {}

    def catch(self, signum: int, handler: Handler) -> None:
        """Install a handler.

        Raises:
            ValueError: no such signal.
            OSError: it cannot be caught.
        """
        if not self._before:
            is_undone(self._put_back_all)
            undo_in_children(self._put_back_all, self._before)
        before = signal.signal(signum, handler)
        self._users[signum] = self._users.get(signum, 0) + 1
        self._before.setdefault(signum, before)
        self._ours[signum] = handler

    def release(self, signums: Iterable[int]) -> None:
        """Undo :meth:`catch`; a handler that was installed over ours since stays."""
        for signum in signums:
            if signum not in self._users:
                # A user in the process of which this one was forked.
                continue
            self._users[signum] -= 1
            if self._users[signum] == 0:
                self._put_back(signum)
        if not self._before:
            is_undone(self._put_back_all)

    def _put_back_all(self) -> None:
        for signum in list(self._before):
            self._put_back(signum)

    def _put_back(self, signum: int) -> None:
        del self._users[signum]
        before, ours = self._before.pop(signum), self._ours.pop(signum)
        if signal.getsignal(signum) is ours:
            # None: installed by C code, and Python cannot put it back.
            signal.signal(signum, signal.SIG_DFL if before is None else before)
