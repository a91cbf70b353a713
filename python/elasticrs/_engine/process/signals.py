"""Signals to this process: repeated stop requests, and handlers that forked children must not inherit.

A forked child would handle a signal as a request to stop the parent's job. Therefore, code that installs
handlers registers a function here that removes them, and each child calls this function first.

- **FORK-1** Installations are undone in reverse order.
- **FORK-2** The signals are blocked before the fork until the child has removed the parent's handlers.
- **FORK-3** The parent loses no signal. The hook of :func:`os.fork` drops exceptions of handlers that run
  inside it. So the parent takes the pending signals from the kernel, and sends them to itself afterwards.
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
"""Signals that each thread had blocked before its fork began, by thread id."""


def undo_in_children(undo: Callable[[], None], signums: Collection[int]) -> None:
    """Register a function that restores the previous signal handling. It is called first in each forked
    child. ``signums`` are the signals that it restores. They are looked up again at each fork, because the
    collection may change.
    """
    _installed.append((undo, signums))


def is_undone(undo: Callable[[], None]) -> None:
    """Unregister a function of :func:`undo_in_children`, once the signal handlers are removed. Idempotent."""
    _installed[:] = [each for each in _installed if each[0] != undo]


def _before() -> None:
    signums = {signum for _, each in _installed for signum in tuple(each)}
    if signums:
        # Save the signal mask first, because each call of `pthread_sigmask` may run signal handlers, which
        # may raise.
        _masks[_thread.get_ident()] = set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        signal.pthread_sigmask(signal.SIG_BLOCK, signums)


def _after_in_parent() -> None:
    mask = _masks.pop(_thread.get_ident(), None)
    if mask is None:
        return
    taken: list[int] = []
    try:
        # Only the main thread runs Python's signal handlers.
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
"""Seconds after the first stop signal in which further stop signals count as the same request to stop.
Wrapper programs pass signals on, and systemd, schedulers and terminals send several kinds at once.
"""

KEYBOARD = frozenset((signal.SIGINT, signal.SIGQUIT))
"""Stop signals that a user can send from the keyboard."""


class StopRequests:
    """Decides whether a stop signal is a new request to stop, or only repeats an earlier one."""

    __slots__ = ("_came", "_first")

    def __init__(self) -> None:
        self._first: float | None = None
        self._came: set[int] = set()

    def is_new(self, signum: int, now: float) -> bool:
        """Record a stop signal that arrived at ``now``, in monotonic seconds. Return true if it is a new
        request to stop. The first signal is a new request. Later than :data:`ECHO` seconds after it, a signal
        from the keyboard or a repeated SIGTERM is a new request as well.
        """
        first, came = self._first, signum in self._came
        self._came.add(signum)
        if first is None:
            self._first = now
            return True
        return now - first >= ECHO and (signum in KEYBOARD or (came and signum == signal.SIGTERM))
