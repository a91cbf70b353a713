"""Handle SIGTERM and SIGUSR1 in a training worker, as requests for a checkpoint.

By default, SIGTERM ends a process in the middle of a step. With this module, a worker completes its step,
saves a checkpoint with the others, leaves the job, and ends itself. After SIGUSR1, it saves and continues.

- **SIGNALS-1** a handler that the program has set, in any language, is not replaced. The handlers of this
  module are removed when the training is over, and in forked children.
- **SIGNALS-2** a second SIGTERM ends the worker at once. A worker that leaves also ends if it is in no round
  for :data:`MEETING_LIMIT` seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from elasticrs._engine.workers.functions.interrupts import CaughtSignals

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from elasticrs.train.coordinator import Coordinator

MEETING_LIMIT = 5.0
"""Seconds after which a leaving worker exits if it is in no round: the others may be leaving as well."""

_TICK = 0.25
_ASKING = (signal.SIGTERM, signal.SIGUSR1)


class RequestSignals:
    """Context manager that passes SIGTERM and SIGUSR1 on to a coordinator. Works only in the main thread."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._caught = CaughtSignals()
        self._is_leaving = False
        self._is_over = threading.Event()

    def __enter__(self) -> None:
        if not self._coordinator.takes_requests or threading.current_thread() is not threading.main_thread():
            return
        for signum in _ASKING:
            if is_default(signum):
                self._caught.catch(signum, self._ask)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._caught.release(_ASKING)

    def _ask(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002 -- handler signature
        if signum == signal.SIGTERM:
            if self._is_leaving:
                self.end_process()
            self._is_leaving = True
            threading.Thread(target=self._watch_meeting, name="elasticrs-leaving", daemon=True).start()
        self._coordinator.request(leave=signum == signal.SIGTERM)

    def _watch_meeting(self) -> None:
        limit = MEETING_LIMIT if self._coordinator.others_come_back else _TICK
        left = limit
        while left > 0:
            if self._is_over.wait(_TICK):
                return
            left = limit if self._coordinator.has_round else left - _TICK
        # Send a second SIGTERM, on which the handler in the main thread ends the process.
        os.kill(os.getpid(), signal.SIGTERM)

    def end_process(self) -> None:
        """End this process with SIGTERM, as if this module had not handled the signal."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def is_default(signum: int) -> bool:
    """Return true if a signal has its default action. Read ``/proc``, too, to find native handlers."""
    if signal.getsignal(signum) != signal.SIG_DFL:
        return False
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            caught = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt"))
    except OSError:
        return True
    return not caught >> (signum - 1) & 1
