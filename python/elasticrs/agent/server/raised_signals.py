"""Context manager that raises an exception for a stop signal, as torch's agent does. An exception is used
because it interrupts even a blocking hook of the agent.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from elasticrs._engine.process.signals import StopRequests
from elasticrs._engine.workers.functions.interrupts import CaughtSignals, raise_when_safe, when_safe
from elasticrs.multiprocessing.api import SignalException

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from types import FrameType

_log = logging.getLogger("elasticrs.agent")


@contextmanager
def raised_signals(
    signums: Collection[int],
    forwarded: Iterable[int] = (),
    pass_on: Callable[[int], object] = lambda _: None,
) -> Iterator[None]:
    """Raise :class:`SignalException` in the main thread when a signal requests a stop while the block runs.
    Restore the previous signal handlers afterwards. A repeated signal that is not a new request (see
    :class:`.StopRequests`) raises nothing.

    Outside of the main thread, log a warning and install no handler. Forked children get the previous
    handlers.

    Args:
        signums: signals to catch. Ignored signals stay ignored.
        forwarded: further signals. They raise nothing; ``pass_on`` is called with the signal number.
        pass_on: function for the signals in ``forwarded``.
    """
    if threading.current_thread() is not threading.main_thread():
        _log.warning("signals are not handled, because the job does not run in the main thread")
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
