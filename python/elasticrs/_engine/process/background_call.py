"""Runs blocking calls, such as name lookups and accesses to network file systems, on their own threads."""

from __future__ import annotations

import _thread
import os
import select
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    _T = TypeVar("_T")

FILE_LIMIT = 3.0
"""Time limit in seconds for file accesses. The limit is short, because files are read before each restart."""


def _start_thread(work: Callable[[], None], *, blocks_signals: bool = True) -> None:
    """Run a function on a new thread. Raise ``RuntimeError`` if no thread can be started."""

    def run() -> None:
        if blocks_signals:
            # Other threads handle signals.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        work()

    _thread.start_new_thread(run, ())


class FileAccess:
    """Runs functions that access files, one at a time. Each runs on a thread and has a time limit in seconds.
    If a function exceeds the limit, ``hangs`` is called, and the next function starts only after the slow one
    has returned. So a file system that hangs delays the agent only once, and occupies only one thread.
    """

    def __init__(self, hangs: Callable[[], object] = lambda: None, limit: float | None = None) -> None:
        self._hangs, self._limit = hangs, FILE_LIMIT if limit is None else limit
        self._is_stuck = False
        self._free = _thread.allocate_lock()

    def run(self, ask: Callable[[], _T], default: _T) -> _T:
        """Call ``ask``. Return its result; ``default`` if it takes too long or an earlier call hangs."""
        if not self._free.acquire(timeout=0 if self._is_stuck else self._limit):
            return self._late(default)
        self._is_stuck = False
        found: list[_T] = []
        errors: list[BaseException] = []
        done = _thread.allocate_lock()
        done.acquire()

        def work() -> None:
            try:
                found.append(ask())
            except BaseException as error:
                errors.append(error)
            self._free.release()
            done.release()

        if not self._start(work):
            return default
        if not done.acquire(timeout=self._limit):
            return self._late(default)
        if errors:
            raise errors[0]
        return found[0]

    def begin(self, act: Callable[[], object]) -> bool:
        """Start ``act``, which must not raise, in a thread. Do nothing and return false if a function that
        was started earlier is still running, or if no thread can be started.
        """

        def work() -> None:
            try:
                act()
            finally:
                self._free.release()

        return self._free.acquire(blocking=False) and self._start(work)

    def _start(self, work: Callable[[], None]) -> bool:
        try:
            _start_thread(work)
        except RuntimeError:  # The process has reached its limit on threads.
            self._free.release()
            return False
        return True

    def _late(self, default: _T) -> _T:
        if not self._is_stuck:
            self._is_stuck = True
            self._hangs()
        return default


class BackgroundCall:
    """Calls a function that may block, on a separate thread. ``fd`` becomes readable when it has returned.
    The thread is needed because the main thread runs no signal handlers while it is blocked in the C library,
    for example in the resolver. Without ``blocks_signals``, the function runs with the calling thread's
    signal mask, which programs that it starts inherit. The constructor raises ``OSError`` if no file
    descriptor is free, and ``RuntimeError`` if no thread can be started.
    """

    def __init__(self, ask: Callable[[], Any], *, blocks_signals: bool = True) -> None:
        self._ask = ask
        self._answer: Any = None
        self._error: BaseException | None = None
        self._lock = _thread.allocate_lock()
        self._is_over = self._is_closed = self._is_interrupted = False
        self._thread: int | None = None
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            _start_thread(self._run, blocks_signals=blocks_signals)
        except RuntimeError:
            os.close(self.fd)
            raise

    def _run(self) -> None:
        try:
            with self._lock:
                self._thread = _thread.get_ident()
                if self._is_interrupted:
                    raise SystemExit
            self._answer = self._ask()
        except BaseException as error:
            self._error = error
        finally:
            # Do this even if the exception of `interrupt` arrives only now, after the function has returned.
            with self._lock:
                self._is_over = True
                if self._is_closed:
                    os.close(self.fd)
                else:
                    os.eventfd_write(self.fd, 1)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the function has returned. Return false on timeout. Signal handlers may raise here."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def interrupt(self) -> None:
        """Raise ``SystemExit`` in the function at its next Python instruction, if it is still running."""
        import ctypes

        with self._lock:
            self._is_interrupted = True
            if self._thread is not None and not self._is_over:
                raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
                raise_in(ctypes.c_ulong(self._thread), ctypes.py_object(SystemExit))

    def take(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._answer

    def close(self) -> None:
        """Close the file descriptor. If the function still runs, it continues, but its result is ignored."""
        with self._lock:
            if self._is_over and not self._is_closed:
                os.close(self.fd)
            self._is_closed = True
