"""Signals as errors, for an agent whose hooks may wait anywhere, as torch's agent raises them."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from elasticrs.multiprocessing.api import SignalException
from elasticrs.multiprocessing.interrupts import CaughtSignals, raise_when_safe, when_safe
from elasticrs.stop_requests import StopRequests

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from types import FrameType


@contextmanager
def raised_signals(
    signums: Collection[int],
    forwarded: Iterable[int] = (),
    pass_on: Callable[[int], object] = lambda _: None,
) -> Iterator[None]:
    """Raise :class:`SignalException` in the main thread when one of these signals asks to stop, and put
    everything back after that. What is no new request (:class:`.StopRequests`) raises nothing.

    Elsewhere than in the main thread nothing is installed, and a warning says so. Children made by ``fork``
    have what was there before.

    Args:
        signums: what to catch; ignored ones are left alone.
        forwarded: further signals, which raise nothing: ``pass_on`` is called with them.
        pass_on: see ``forwarded``.
    """
    if threading.current_thread() is not threading.main_thread():
        warnings.warn("not in the main thread: signals are not handled", RuntimeWarning, stacklevel=3)
        yield
        return

    requests = StopRequests()

    def raise_error(signum: int, _frame: FrameType | None) -> None:
        if requests.is_new(signum, time.monotonic()):
            sigval = signal.Signals(signum)
            raise_when_safe(SignalException(f"stopped by {sigval.name}", sigval))

    def forward(signum: int, _frame: FrameType | None) -> None:
        when_safe(partial(pass_on, signum))

    caught, signals = CaughtSignals(), []
    try:
        for signum in {*signums, *forwarded}:
            if signal.getsignal(signum) != signal.SIG_IGN:
                caught.catch(signum, raise_error if signum in signums else forward)
                signals.append(signum)
        yield
    finally:
        caught.release(signals)
