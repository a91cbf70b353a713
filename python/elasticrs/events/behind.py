"""Writes lines in the background. A thread takes the lines from a bounded queue and writes them in order."""

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
"""Maximum number of queued lines. Further lines are dropped."""


class Behind:
    """Queue of lines, and a thread that writes them. A thread is needed, because a write may block forever.

    Args:
        write: writes a line. The second argument is true if the line must be flushed to disk. Only the thread
            calls this function.
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
        """True in the process that created this object. False in a forked child, because the child does not
        inherit the thread.
        """
        return self._owner == os.getpid()

    def put(self, line: bytes, is_failure: bool) -> bool:
        """Queue a line. Return false if the line was dropped because too many lines are waiting."""
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
        # Block all signals in the new thread, so that the main thread receives them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait(self, seconds: float) -> int:
        """Wait until all lines are written, for at most ``seconds``. Return the number of unwritten lines."""
        deadline = time.monotonic() + seconds
        with self._news:
            while self._lines and (left := deadline - time.monotonic()) > 0:
                self._news.wait(left)
            return len(self._lines)

    def end(self) -> None:
        """Wait until all lines are written, and then stop the thread."""
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
                # Remove the line only after it is written, so that it counts as unwritten until then.
                self._lines.popleft()
                self._news.notify_all()
