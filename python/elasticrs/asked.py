"""Questions whose answer may take long, such as those to name servers and network file systems."""

from __future__ import annotations

import _thread
import os
import select
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Asked:
    """What a function returns that may block for long, on a thread of its own.

    A main thread that waits in the C library's resolver hears no signal.

    Args:
        ask: called once.

    Attributes:
        fd: readable when the function has returned.

    Raises:
        OSError: no descriptor.
        RuntimeError: no thread.
    """

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask
        self._answer: Any = None
        self._error: BaseException | None = None
        self._lock = _thread.allocate_lock()
        self._is_over = self._is_closed = False
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:
            os.close(self.fd)
            raise

    def _run(self) -> None:
        # They are for threads that have something to do about them.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._answer = self._ask()
        except BaseException as error:
            self._error = error
        with self._lock:
            self._is_over = True
            if self._is_closed:
                os.close(self.fd)
            else:
                os.eventfd_write(self.fd, 1)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the function, at most so many seconds; True if it has returned. Handlers of signals run
        meanwhile, and may raise.
        """
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def take(self) -> Any:
        """Return what the function has returned, or raise what it has raised."""
        if self._error is not None:
            raise self._error
        return self._answer

    def close(self) -> None:
        """Give the descriptor back. A function that has not returned goes on, and nobody hears of it."""
        with self._lock:
            if self._is_over and not self._is_closed:
                os.close(self.fd)
            self._is_closed = True
