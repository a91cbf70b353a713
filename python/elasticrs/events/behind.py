"""Writing that holds nobody up: a bounded queue, and a thread that writes what is in it, in order."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MOST = 10_000
"""Lines that may wait; more are dropped."""


class Behind:
    """Lines before a function that may block for ever.

    Args:
        write: takes a line, and whether it has to be on the disk; called by the thread alone.
    """

    def __init__(self, write: Callable[[bytes, bool], None]) -> None:
        self._write = write
        self._owner = os.getpid()
        self._lines: deque[tuple[bytes, bool]] = deque()
        self._news = threading.Condition()
        self._is_ending = False
        self._thread: threading.Thread | None = None

    @property
    def is_ours(self) -> bool:
        """True in the process that made it: a child made by ``fork`` has no such thread."""
        return self._owner == os.getpid()

    def put(self, line: bytes, is_failure: bool) -> bool:
        """Queue a line; return false if it was dropped, since too many wait."""
        with self._news:
            if len(self._lines) >= MOST:
                return False
            self._lines.append((line, is_failure))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="elasticrs-events", daemon=True)
                self._start(self._thread)
            self._news.notify_all()
            return True

    @staticmethod
    def _start(thread: threading.Thread) -> None:
        # Signals are the main thread's.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait(self, seconds: float) -> int:
        """Wait until all is written, at most so long; return the number of lines that are not."""
        deadline = time.monotonic() + seconds
        with self._news:
            while self._lines and (left := deadline - time.monotonic()) > 0:
                self._news.wait(left)
            return len(self._lines)

    def end(self) -> None:
        """End the thread, which has nothing left to write."""
        with self._news:
            self._is_ending = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._news:
                while not self._lines and not self._is_ending:
                    self._news.wait()
                if not self._lines:
                    return
                line, is_failure = self._lines[0]
            self._write(line, is_failure)
            with self._news:
                # It counts as waiting until it is written.
                self._lines.popleft()
                self._news.notify_all()
