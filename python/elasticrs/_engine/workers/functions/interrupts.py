"""Run the actions of signal handlers immediately, except during critical operations.

If a handler raised an exception while an event is being handled, the event would be lost. So while the main
thread waits for events (:func:`waiting`), the actions of handlers are deferred until the event has been
recorded. In a block that starts or closes something (:func:`held`), they are deferred until the block waits
for events or ends. Forked children start without deferred actions.
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
"""Functions that interrupt the waits of the main thread, innermost wait last. Waits are nested if a signal
handler interrupts a wait and then waits itself.
"""

_holds: list[bool] = []
_kept: list[Callable[[], object]] = []


def _begin_anew() -> None:
    # Create new lists instead of clearing the old ones, because the child may still be inside `with` blocks
    # that will remove their entries from the old lists.
    global _waits, _holds, _kept
    _waits, _holds, _kept = [], [], []


os.register_at_fork(after_in_child=_begin_anew)


def when_safe(call: Callable[[], object]) -> None:
    """Call a function from a signal handler. While an event is being handled, defer the call, because an
    exception from the function could cause the loss of the event.
    """
    _kept.append(call)
    if _waits:
        _waits[-1]()
    elif not _holds:
        call_kept()


def raise_when_safe(error: BaseException) -> None:
    """Raise an exception from a signal handler, but defer it while it could cause an event to be lost."""

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
    """Return a context manager for a block that waits for an event and records it. A signal handler calls
    ``end`` to end the wait early. The action for the signal runs after the block.
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
    """Signal handlers shared by several contexts. The previous handler is restored when the last context
    releases the signal, and also in forked children. For use in the main thread only.
    """

    def __init__(self) -> None:
        self._before: dict[int, Handler] = {}
        self._ours: dict[int, Handler] = {}
        self._users: dict[int, int] = {}

    def catch(self, signum: int, handler: Handler) -> None:
        """Install a handler for a signal.

        Raises:
            ValueError: the signal does not exist.
            OSError: the signal cannot be caught.
        """
        if not self._before:
            is_undone(self._put_back_all)
            undo_in_children(self._put_back_all, self._before)
        before = signal.signal(signum, handler)
        self._users[signum] = self._users.get(signum, 0) + 1
        self._before.setdefault(signum, before)
        self._ours[signum] = handler

    def release(self, signums: Iterable[int]) -> None:
        """Undo :meth:`catch` for these signals. If other code has installed a handler since then, keep that
        handler.
        """
        for signum in signums:
            if signum not in self._users:
                # The signal was not caught, or this process is a forked child, in which the previous handler
                # has already been restored.
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
            # `None` means that C code installed the handler, so Python cannot restore it.
            signal.signal(signum, signal.SIG_DFL if before is None else before)
