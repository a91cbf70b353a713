"""Signals as errors, for an agent whose hooks may wait anywhere, as torch's agent raises them."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

from elasticrs.agent.signals import StopRequests
from elasticrs.forks import is_undone, undo_in_children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from elasticrs.agent.signals import Handler


@contextmanager
def raised_signals(
    signums: Iterable[int],
    error: Callable[[str, signal.Signals], Exception],
    interrupt: Callable[[Exception], bool],
    forwarded: Iterable[int] = (),
    pass_on: Callable[[int], None] | None = None,
) -> Iterator[None]:
    """Raise an error in the main thread when one of these signals asks to stop, and put everything back after
    that. What is no new request (:class:`.StopRequests`) raises nothing.

    Elsewhere than in the main thread nothing is installed, and a warning says so. Children made by ``fork``
    have what was there before.

    Args:
        signums: what to catch; ignored ones are left alone.
        error: made of a text and the signal.
        interrupt: may take the error, to raise it itself a moment later.
        forwarded: further signals, which raise nothing.
        pass_on: called with one of them.
    """
    if threading.current_thread() is not threading.main_thread():
        warnings.warn("not in the main thread: signals are not handled", RuntimeWarning, stacklevel=3)
        yield
        return

    requests = StopRequests()

    def raise_error(signum: int, _frame: FrameType | None) -> None:
        if not requests.is_new(signum, time.monotonic()):
            return
        sigval = signal.Signals(signum)
        raised = error(f"stopped by {sigval.name}", sigval)
        if not interrupt(raised):
            raise raised

    def forward(signum: int, _frame: FrameType | None) -> None:
        if pass_on is not None:
            pass_on(signum)

    previous: dict[int, Handler] = {}

    def put_back() -> None:
        for signum, handler in previous.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    undo_in_children(put_back, previous)
    try:
        for signum, ours in {
            **dict.fromkeys(forwarded, forward),
            **dict.fromkeys(signums, raise_error),
        }.items():
            if (handler := signal.getsignal(signum)) != signal.SIG_IGN:
                previous[signum] = handler
                signal.signal(signum, ours)
        yield
    finally:
        put_back()
        is_undone(put_back)
