"""Runs a blocking call, such as a name lookup or an access to a network file system, on its own thread."""

from __future__ import annotations

import _thread
import os
import select
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class BackgroundCall:
    """Calls a function that may block for a long time, on a separate thread.

    The main thread cannot make such a call itself, because Python runs no signal handlers while the main
    thread is blocked in the C library, for example in the resolver.

    Args:
        ask: function to call once.

    Attributes:
        fd: file descriptor that is readable when the function has returned.

    Raises:
        OSError: the process has run out of file descriptors.
        RuntimeError: no thread can be started.
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
        # Block all signals in this thread, because other threads handle them.
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
        """Wait until the function has returned, for at most ``seconds``. Return false on timeout. Signal
        handlers run during the wait and may raise exceptions.
        """
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def take(self) -> Any:
        """Return the result of the function, or raise its exception."""
        if self._error is not None:
            raise self._error
        return self._answer

    def close(self) -> None:
        """Close the file descriptor. If the function is still running, it continues, but its result is
        ignored.
        """
        with self._lock:
            if self._is_over and not self._is_closed:
                os.close(self.fd)
            self._is_closed = True
