"""Run the actions of signal handlers immediately, except during critical operations.

While the main thread waits for events (:func:`waiting`), actions are deferred until the event has been
recorded, because their exceptions would lose the event. In a block that starts or closes something
(:func:`held`), they are deferred until the block waits for events or ends.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from elasticrs._engine.process.signals import is_undone, undo_in_children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from types import FrameType
    from typing import TypeAlias, TypeVar

    _T = TypeVar("_T")
    Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | signal.Handlers | None

_waits: list[Callable[[], None]] = []
"""Functions that interrupt the current waits of the main thread. The last function belongs to the innermost
wait: a signal handler may wait while the program waits.
"""

_holds: list[bool] = []
_kept: list[Callable[[], object]] = []


def _begin_anew() -> None:
    # In a forked child, `with` blocks that the parent had entered still change the old lists. Use new ones.
    global _waits, _holds, _kept
    _waits, _holds, _kept = [], [], []


os.register_at_fork(after_in_child=_begin_anew)


def when_safe(call: Callable[[], object]) -> None:
    """Call a function from a signal handler: now, or later if a call now could cause an event to be lost."""
    _kept.append(call)
    if _waits:
        _waits[-1]()
    elif not _holds:
        call_kept()


def raise_when_safe(error: BaseException) -> None:
    def raise_it() -> None:
        raise error

    when_safe(raise_it)


def call_kept() -> None:
    """Call the deferred functions. Afterwards, raise the first exception; later ones are dropped."""
    if not _kept or threading.current_thread() is not threading.main_thread():
        return
    raised: BaseException | None = None
    while _kept:
        try:
            _kept.pop(0)()
        except BaseException as error:  # noqa: PERF203 -- an error must not stop the loop
            raised = raised or error
    if raised is not None:
        raise raised


@contextmanager
def waiting(end: Callable[[], None]) -> Iterator[None]:
    """Mark a block that waits for an event and records it. To end the wait early, a signal handler calls
    ``end``.
    """
    with _block(_waits, end, is_wait=True):
        if _kept and threading.current_thread() is threading.main_thread():
            # A signal arrived before this wait started, so end the wait immediately.
            end()
        yield


def held() -> AbstractContextManager[None]:
    """Defer signal handlers' actions until the block ends, or until it waits for events."""
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
    """Signal handlers that several users share. The last :meth:`release` restores the old handler."""

    def __init__(self) -> None:
        self._before: dict[int, Handler] = {}
        self._ours: dict[int, Handler] = {}
        self._users: dict[int, int] = {}

    def catch(self, signum: int, handler: Handler) -> None:
        """Install a handler. Raise ``ValueError`` or ``OSError`` if the signal cannot be caught."""
        if not self._before:
            is_undone(self._put_back_all)
            undo_in_children(self._put_back_all, self._before)
        before = signal.signal(signum, handler)
        self._users[signum] = self._users.get(signum, 0) + 1
        self._before.setdefault(signum, before)
        self._ours[signum] = handler

    def release(self, signums: Iterable[int]) -> None:
        """Undo :meth:`catch` for these signals, unless other code has installed a handler since then."""
        for signum in signums:
            if signum not in self._users:
                continue  # It was not caught, or this forked child has already restored the previous handler.
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
            # `None` means that C code installed the handler.
            signal.signal(signum, signal.SIG_DFL if before is None else before)
