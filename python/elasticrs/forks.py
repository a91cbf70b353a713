"""A child made by ``fork`` has its own signals.

It is a copy of this process, with the handlers and the wake-up descriptor that we have installed: a signal
to it would stop the job of its parent, or be kept for a wait that goes on only there. So whoever installs
such things says here how they are undone, and each child does that before anything else.

- **FORK-1** what was installed last is undone first.
- **FORK-2** the signals are blocked from before the fork until then: one that is sent as soon as the pid is
  known gets the child's own action.
- **FORK-3** in the parent none is lost by that. In the main thread a handler would run inside of the hook of
  :func:`os.fork`, which drops what it raises: there such a signal is taken, and sent again a moment later.
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
"""By thread that forks, the signals that were blocked before."""


def undo_in_children(undo: Callable[[], None], signums: Collection[int]) -> None:
    """Make children of this process begin with a call that puts back what was there before, in their main
    thread.

    Args:
        undo: the call.
        signums: what has a handler of ours; looked at for each fork.
    """
    _installed.append((undo, signums))


def is_undone(undo: Callable[[], None]) -> None:
    """Take back :func:`undo_in_children`: there is nothing left to undo. Idempotent."""
    _installed[:] = [each for each in _installed if each[0] != undo]


def _before() -> None:
    signums = {signum for _, each in _installed for signum in tuple(each)}
    if signums:
        # First, as the second call may raise: Python's handlers run at its end.
        _masks[_thread.get_ident()] = set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        signal.pthread_sigmask(signal.SIG_BLOCK, signums)


def _after_in_parent() -> None:
    mask = _masks.pop(_thread.get_ident(), None)
    if mask is None:
        return
    taken: list[int] = []
    try:
        # The first thread, in which Python's handlers run.
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
