"""Signals to this process: repeated stop requests, and handlers that forked children must not inherit.

A forked child has the same signal handlers and the same wake-up file descriptor as this process. A signal to
the child would therefore be handled as a request to stop the parent's job, or would be deferred until the end
of a wait that exists only in the parent. To prevent this, code that installs handlers registers a function
here that removes the handlers, and each child calls this function first.

- **FORK-1** Installations are undone in reverse order.
- **FORK-2** The signals are blocked before the fork, and unblocked after the child has removed the handlers.
  A signal that is sent to the child right after the fork is therefore never handled by the parent's handlers.
- **FORK-3** The parent loses no signal. In its main thread, a handler could run inside the hook of
  :func:`os.fork`, which drops the handler's exceptions. So the parent takes the pending signals from the
  kernel, and sends them to itself again after the hook.
"""

from __future__ import annotations

import _thread
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_installed: list[tuple[Callable[[], None], Collection[int]]] = []
_masks: dict[int, set[int]] = {}
"""Signals that were blocked before a fork, by thread id."""


def undo_in_children(undo: Callable[[], None], signums: Collection[int]) -> None:
    """Register a function that restores the previous signal handling. Forked children call it first, in their
    main thread.

    Args:
        undo: function that restores the previous handlers.
        signums: signals for which handlers are installed. The collection is read again at each fork.
    """
    _installed.append((undo, signums))


def is_undone(undo: Callable[[], None]) -> None:
    """Unregister a function that was passed to :func:`undo_in_children`. Call this after the signal handlers
    have been removed. Idempotent.
    """
    _installed[:] = [each for each in _installed if each[0] != undo]


def _before() -> None:
    signums = {signum for _, each in _installed for signum in tuple(each)}
    if signums:
        # Save the mask before changing it. Each call of `pthread_sigmask` runs pending Python signal handlers
        # at its end, and they may raise an exception.
        _masks[_thread.get_ident()] = set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        signal.pthread_sigmask(signal.SIG_BLOCK, signums)


def _after_in_parent() -> None:
    mask = _masks.pop(_thread.get_ident(), None)
    if mask is None:
        return
    taken: list[int] = []
    try:
        # In other threads, leave the signals pending, because only the main thread runs Python's signal
        # handlers.
        if _thread.get_native_id() == os.getpid():
            ours = set(signal.pthread_sigmask(signal.SIG_BLOCK, ())) - mask
            while (info := signal.sigtimedwait(ours, 0)) is not None:
                taken.append(info.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for signum in taken:
            _thread.start_new_thread(os.kill, (os.getpid(), signum))


def _after_in_child() -> None:
    mask = _masks.pop(_thread.get_ident(), None)
    _masks.clear()
    try:
        while _installed:
            undo, _ = _installed.pop()
            undo()
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


ECHO = 0.1
"""Time window after the first stop signal, in seconds. Further stop signals in this window belong to the same
request. A single request may cause several signals: wrapper programs pass on a signal that the whole process
group has already received, and systemd, schedulers and closing terminals send several kinds of signals at
once.
"""

KEYBOARD = frozenset((signal.SIGINT, signal.SIGQUIT))
"""Stop signals that a user can send from the keyboard."""


class StopRequests:
    """Detector for stop signals that only repeat an earlier request."""

    __slots__ = ("_came", "_first")

    def __init__(self) -> None:
        self._first: float | None = None
        self._came: set[int] = set()

    def is_new(self, signum: int, now: float) -> bool:
        """Record a stop signal. Return true if it is a new request. ``now`` is the time on a monotonic clock,
        in seconds.

        The first signal is a new request. A later signal is a new request only if it arrives at least
        :data:`ECHO` seconds after the first signal, and is one of :data:`KEYBOARD` or a repeated SIGTERM.
        Such a signal shows that the user has repeated the request.
        """
        first, came = self._first, signum in self._came
        self._came.add(signum)
        if first is None:
            self._first = now
            return True
        return now - first >= ECHO and (signum in KEYBOARD or (came and signum == signal.SIGTERM))
