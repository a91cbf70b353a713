"""The client of timers over a FIFO: of the agent's own, of :class:`FileTimerServer`, and of torch's.

**How it writes.** Under an agent of ours, which says so by ``ELASTICRS_TIMER_FILE``, the FIFO stays open,
and a record is one ``write``. Anywhere else it is opened for each record, since torch's server never
expires anything while a writer has it open. No write ever blocks. A record that the pipe has no room for is
dropped and counted, but a *release* is kept and tried again: without it a healthy worker would be killed.
"""

from __future__ import annotations

import os
import time
from _thread import RLock
from math import isnan

from elasticrs import lazy
from elasticrs.timer.api import TimerClient, TimerRequest, _logger, places
from elasticrs.timer.descendants import started_at

try:
    from _json import encode_basestring_ascii as _quote
except ImportError:  # an interpreter without the accelerator
    from json.encoder import encode_basestring_ascii as _quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elasticrs.timer.file_server import FileTimerServer

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]

_SIGKILL = 9
_PIPE_BUF = 4096
_ATTEMPTS, _PAUSE = 10, 0.1
_FAR = 1e11
"""Seconds since 1970: no timer is due later, however infinite."""


_HOMES = {
    "elasticrs.timer.file_server": ("FileTimerServer",),
    "elasticrs.timer.debug_info_logging": ("log_debug_info_for_expired_timers",),
}


def __getattr__(name: str) -> Any:
    return lazy(__name__, name, _HOMES)


class FileTimerRequest(TimerRequest):
    """A request with a signal.

    Args:
        worker_pid: who.
        scope_id: the name of the timer.
        expiration_time: when it is due, in seconds since 1970; negative: release.
        signal: what ends the worker; 0 or less: nothing does, the timer only tells.
    """

    __slots__ = ("signal", "version")
    __hash__ = None  # as for any mutable value

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        super().__init__(worker_pid, scope_id, expiration_time)
        self.version = 1
        self.signal = signal

    @property
    def worker_pid(self) -> int:
        """Who."""
        return int(self.worker_id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FileTimerRequest):
            return False
        return super().__eq__(other) and (self.version, self.signal) == (other.version, other.signal)

    def to_json(self) -> str:
        """As it is written, without the newline."""
        import json

        return json.dumps({
            "version": self.version,
            "pid": self.worker_pid,
            "scope_id": self.scope_id,
            "expiration_time": self.expiration_time,
            "signal": int(self.signal),
        })  # fmt: skip


class FileTimerClient(TimerClient):
    """The worker's side. May be used by several threads, and after a fork.

    As in torch, the first request fails when no server reads the FIFO, after trying for a second. A server
    that was there once, and our own agent, may go away without harm: requests are counted as dropped then.

    Args:
        file_path: the FIFO, in a worker ``os.environ["TORCHELASTIC_TIMER_FILE"]``.
        signal: what ends the worker when a timer expires; 0 or less: nothing does, the timer only tells.

    Attributes:
        dropped: how many requests nobody got.
    """

    def __init__(self, file_path: str, signal: int = _SIGKILL) -> None:
        super().__init__()
        self._file_path = os.fspath(file_path)
        self.signal = signal
        self.dropped = 0
        self._keeps_open = os.environ.get("ELASTICRS_TIMER_FILE") == self._file_path
        self._met_server = self._keeps_open
        self._warned = False
        self._fd = -1
        self._identity = (0, 0)
        self._forked()

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """See the base class.

        Raises:
            ValueError: the time is not a number.
            RuntimeError: the request is longer than a pipe takes in one piece.
            BrokenPipeError: no server was there to begin with.
        """
        if not abs(expiration_time) <= _FAR:
            if isnan(expiration_time):
                raise ValueError("a timer's expiration time is not a number")
            expiration_time = _FAR if expiration_time > 0 else 0.0
        self._check_process()
        extra = ""
        if self._keeps_open:
            left_ns = int((expiration_time - time.time()) * 1e9)
            extra = f', "deadline_ns": {max(0, time.monotonic_ns() + left_ns)}{self._start_time}'
            at = places.get((id(self), scope_id))
            if at is not None:
                extra += f', "at": {_quote(at[:200])}'
        self._send(scope_id, expiration_time, int(self.signal), extra)

    def release(self, scope_id: str) -> None:
        self._check_process()
        self._send(scope_id, -1, 0, self._start_time if self._keeps_open else "")

    def close(self) -> None:
        """Close the FIFO; the next request opens it again."""
        with self._lock:
            if self._fd_is_ours():
                os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        # Without the lock: after a fork it may be held by a thread that this process does not have.
        if getattr(self, "_fd", -1) >= 0 and self._fd_is_ours():
            os.close(self._fd)

    def _send_request(self, request: FileTimerRequest) -> None:
        """Send any request, as torch's method of this name."""
        self._check_process()
        self._write(request.to_json().encode() + b"\n", is_release=request.expiration_time < 0)

    # --- one process ---

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            self._forked()

    def _forked(self) -> None:
        """What belongs to the parent is its own affair: its threads, hence the lock, and its releases."""
        self._pid = os.getpid()
        self._lock = RLock()
        self._pending: list[bytes] = []
        self._has_thread = False
        self._start_time = ""
        if self._keeps_open:
            started = started_at("self")
            self._start_time = f', "start_time": {started}' if started else ""

    # --- writing ---

    def _send(self, scope_id: str, expiration_time: float, signal: int, extra: str) -> None:
        line = (
            f'{{"version": 1, "pid": {self._pid}, "scope_id": {_quote(scope_id)}, '
            f'"expiration_time": {expiration_time!r}, "signal": {signal}{extra}}}\n'
        )
        self._write(line.encode(), is_release=expiration_time < 0)

    def _write(self, line: bytes, *, is_release: bool) -> None:
        if len(line) > _PIPE_BUF:
            raise RuntimeError(f"a timer request has at most {_PIPE_BUF} bytes, this one has {len(line)}")
        with self._lock:
            # In their order: a release that waits must not end a later timer of its name.
            if self._flush() and self._put(line):
                return
            if is_release:
                self._pending.append(line)
                self._flush_later()
            else:
                self._drop("the pipe is full")

    def _put(self, line: bytes) -> bool:
        """Whether nothing is left to do: written, or nobody to write to. False: the pipe is full."""
        fd = self._open()
        if fd < 0:
            return True
        try:
            os.write(fd, line)
        except BlockingIOError:
            return False
        except OSError as error:
            self._drop(f"the server has gone: {error.strerror}")
            self.close()
        finally:
            if not self._keeps_open:
                self.close()
        self._met_server = True
        return True

    def _open(self) -> int:
        """The descriptor; -1 when nobody reads the FIFO.

        Raises:
            BrokenPipeError: nobody ever did.
        """
        if self._fd_is_ours():
            return self._fd
        attempts = 1 if self._met_server else _ATTEMPTS
        for attempt in range(1, attempts + 1):
            try:
                self._fd = os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:  # noqa: PERF203 -- waiting is what takes time
                if attempt < attempts:
                    time.sleep(_PAUSE)
                elif self._met_server:
                    self._drop(f"nobody reads {self._file_path}: {error.strerror}")
                else:
                    raise BrokenPipeError(
                        error.errno, f"no timer server reads {self._file_path}: {error.strerror}"
                    ) from error
            else:
                found = os.fstat(self._fd)
                self._identity = (found.st_dev, found.st_ino)
                return self._fd
        return -1

    def _fd_is_ours(self) -> bool:
        """Programs that become daemons close all descriptors, and the number may be another file's now."""
        if self._fd < 0:
            return False
        try:
            found = os.fstat(self._fd)
        except OSError:
            return False
        return self._identity == (found.st_dev, found.st_ino)

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if not self._warned:
            self._warned = True
            _logger().warning("a timer request was dropped (further ones are only counted): %s", why)

    # --- releases that wait ---

    def _flush(self) -> bool:
        while self._pending:
            if not self._put(self._pending[0]):
                return False
            del self._pending[0]
        return True

    def _flush_later(self) -> None:
        if not self._has_thread:
            from threading import Thread

            self._has_thread = True
            Thread(target=self._retry, name="FileTimerClient", daemon=True).start()

    def _retry(self) -> None:
        """Waits for room in the pipe. Ends when nothing is left to send."""
        from select import POLLOUT, poll

        while True:
            with self._lock:
                if self._flush():
                    self._has_thread = False
                    return
                try:
                    fd = os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                except OSError:
                    # Without a server there are no timers either.
                    self._pending.clear()
                    continue
            try:
                room: Any = poll()
                room.register(fd, POLLOUT)
                room.poll(1000)
            finally:
                os.close(fd)
