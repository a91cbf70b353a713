"""Timers over a FIFO: the client of a worker, and the server of a program that runs without an agent.

Without an elasticrs agent (``ELASTICRS_TIMER_FILE``), the client opens the FIFO for each record, because
torch's server expires no timers while a writer has it open. A write never blocks. If the pipe is full, a
request is dropped, but a *release* is sent again, because a healthy worker would be killed without it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` would import more modules
import os
import time
from _thread import RLock
from math import ceil, isnan

from elasticrs import lazy
from elasticrs._engine import public
from elasticrs._engine.process.other_processes import started_at
from elasticrs.timer.api import TimerClient, TimerRequest, _logger, places
from elasticrs.timer.local_timer import DescendantServer

try:
    from _json import encode_basestring_ascii as _quote
except ImportError:  # The interpreter was built without the C JSON accelerator.
    from json.encoder import encode_basestring_ascii as _quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]

_PIPE_BUF = 4096
_ATTEMPTS, _PAUSE = 10, 0.1
_FAR = 1e11
"""Latest expiration time of a timer, in seconds since 1970. It replaces later and infinite times."""


def __getattr__(name: str) -> Any:
    homes = {"elasticrs.timer.debug_info_logging": ("log_debug_info_for_expired_timers",)}
    return lazy(__name__, name, homes)


class FileTimerRequest(TimerRequest):
    """Timer request with the signal to send when it expires.

    Args:
        worker_pid: pid of the worker.
        scope_id: name of the timer.
        expiration_time: expiration in seconds since 1970; a negative number releases the timer.
        signal: signal to send to the worker. If it is 0 or less, the expiration is only reported.
    """

    __slots__ = ("signal", "version")
    __hash__ = None  # mutable, so not hashable

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        super().__init__(worker_pid, scope_id, expiration_time)
        self.version = 1
        self.signal = signal

    @property
    def worker_pid(self) -> int:
        """Pid of the worker."""
        return int(self.worker_id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FileTimerRequest):
            return False
        return super().__eq__(other) and (self.version, self.signal) == (other.version, other.signal)

    def to_json(self) -> str:
        """Return the request as JSON, in the format of the FIFO but without the newline."""
        import json

        return json.dumps({
            "version": self.version,
            "pid": self.worker_pid,
            "scope_id": self.scope_id,
            "expiration_time": self.expiration_time,
            "signal": int(self.signal),
        })  # fmt: skip


class FileTimerClient(TimerClient):
    """Sends requests through a FIFO. It can be used by several threads and by forked children.

    As in torch, the first request raises an exception if no server reads the FIFO after a second of retries.
    Later requests, and all requests under an elasticrs agent, raise nothing: those that cannot be sent are
    counted in ``dropped``.

    Args:
        file_path: path of the FIFO; in a worker, ``os.environ["TORCHELASTIC_TIMER_FILE"]``.
        signal: signal that an expiration sends to the worker. If 0 or less, the expiration is only reported.
    """

    def __init__(self, file_path: str, signal: int = _signal.SIGKILL) -> None:
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
        """Start a timer, or restart it.

        Raises:
            ValueError: the expiration time is NaN.
            RuntimeError: the request is too long for a single write to a pipe.
            BrokenPipeError: no server has read the FIFO so far.
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
        """Close the FIFO. The next request opens it again."""
        with self._lock:
            if self._fd_is_ours():
                os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        # Do not take the lock. In a forked child, it may be held by a thread that does not exist there.
        if getattr(self, "_fd", -1) >= 0 and self._fd_is_ours():
            os.close(self._fd)

    def _send_request(self, request: FileTimerRequest) -> None:
        self._check_process()
        self._write(request.to_json().encode() + b"\n", is_release=request.expiration_time < 0)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            self._forked()

    def _forked(self) -> None:
        """In a forked child, reset the lock, the thread and the queued releases, which are the parent's."""
        self._pid = os.getpid()
        self._lock = RLock()
        self._pending: list[bytes] = []
        self._has_thread = False
        self._start_time = ""
        if self._keeps_open:
            started = started_at("self")
            self._start_time = f', "start_time": {started}' if started else ""

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
            # Do not send a release late, because it could stop a newer timer with the same name.
            if self._flush() and self._put(line):
                return
            if is_release:
                self._pending.append(line)
                self._flush_later()
            else:
                self._drop("the pipe is full")

    def _put(self, line: bytes) -> bool:
        """Write a request to the FIFO, or drop it if no server reads the FIFO. Return false if it is full."""
        fd = self._open()
        if fd < 0:
            return True
        try:
            os.write(fd, line)
        except BlockingIOError:
            return False
        except OSError as error:
            self._drop(f"the timer server is gone: {error.strerror}")
            self.close()
        finally:
            if not self._keeps_open:
                self.close()
        self._met_server = True
        return True

    def _open(self) -> int:
        """Open the FIFO. Return -1 if it has no reader; raise ``BrokenPipeError`` if it never had one."""
        if self._fd_is_ours():
            return self._fd
        attempts = 1 if self._met_server else _ATTEMPTS
        for attempt in range(1, attempts + 1):
            try:
                self._fd = os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:  # noqa: PERF203 -- most of the time is spent sleeping
                if attempt < attempts:
                    time.sleep(_PAUSE)
                elif self._met_server:
                    self._drop(f"no timer server reads {self._file_path}: {error.strerror}")
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
        """Return true if the descriptor is still the FIFO. A program that becomes a daemon may close it."""
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
        """Try again whenever the FIFO has free space, until all queued releases have been written."""
        from select import POLLOUT, poll

        while True:
            with self._lock:
                if self._flush():
                    self._has_thread = False
                    return
                try:
                    fd = os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                except OSError:
                    # No server is left to receive the releases.
                    self._pending.clear()
                    continue
            try:
                room: Any = poll()
                room.register(fd, POLLOUT)
                room.poll(1000)
            finally:
                os.close(fd)


class FileTimerServer(DescendantServer):
    """Kills descendants of this process whose timers have expired, but **never this process itself**.

    Unlike in torch, a timer expires when it is due, only this user can access the FIFO, and :meth:`stop`
    waits until the thread has finished.

    Args:
        file_path: path of the FIFO. ``OSError`` is raised if it cannot be created, or if another file exists.
        run_id: name of the job, for the log.
        max_interval: maximum number of seconds between iterations of the thread.
        daemon: true if the process may exit while the thread runs.
        log_event: called with ``"watchdog started"``, ``"watchdog stopped"``, or, with the request, ``"timer
            expired"`` or ``"kill worker process"``.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        # Import this only in the server, because workers use only the client.
        from elasticrs._core import TimerFifo

        super().__init__(max_interval, daemon)
        self._file_path = os.fspath(file_path)
        self._run_id = run_id
        self._log_event = log_event or (lambda _name, _request: None)
        self._request_count = 0
        self._has_refused = False
        self._last_progress_time = int(time.time())
        self._fifo = TimerFifo(self._file_path)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def start(self) -> None:
        """Start the server thread."""
        super().start()
        self._log_event("watchdog started", None)

    def stop(self) -> None:
        """Stop the thread and remove the FIFO. Idempotent."""
        if self._bell != -1:
            self._end_thread()
            self._close()
            self._log_event("watchdog stopped", None)

    def run_once(self) -> None:
        """Process the requests currently in the FIFO, then stop the server."""
        if self._bell != -1:
            self._end_thread()
            try:
                self._run_watchdog()
            finally:
                self._close()

    def _end_thread(self) -> None:
        os.eventfd_write(self._bell, 1)
        super().stop()

    def _join_limit(self) -> None:
        return None

    def _close(self) -> None:
        self._fifo.close()
        self._close_pidfds()
        os.close(self._bell)
        self._bell = -1

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Return true if a process with this pid exists and this process may signal it."""
        try:
            os.kill(pid, 0)
        except (OSError, OverflowError):
            return False
        return True

    def get_last_progress_time(self) -> int:
        """Return when the thread last ran its loop, in whole seconds since 1970."""
        return self._last_progress_time

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Remove all timers of these processes, and of all processes that have exited."""
        super().clear_timers(
            {pid for pid, _ in self._timers if pid in worker_pids or not self.is_process_running(pid)}
        )

    def _run_watchdog(self) -> None:
        from select import POLLIN, poll

        news = poll()
        for fd in (self._fifo.fd, self._bell):
            news.register(fd, POLLIN)
        news.poll(ceil(self._seconds_to_wait() * 1000))
        # Handle the pending requests first, because they may release or restart timers that are due.
        self.register_timers(self._get_requests())
        all_expired = self.get_expired_timers(self._now())
        log = public("timer.file_based_local_timer.log_debug_info_for_expired_timers")
        log(self._run_id, {pid: [timer.to_json() for timer in timers] for pid, timers in all_expired.items()})
        for pid, timers in all_expired.items():
            self._expire(pid, sorted(timers, key=lambda timer: timer.expiration_time))
        if all_expired:
            self.clear_timers(set(all_expired))
        self._last_progress_time = int(time.time())

    def _expire(self, pid: int, timers: list[FileTimerRequest]) -> None:
        for timer in timers:
            self._log_event("timer expired", timer)
            if timer.signal > 0:
                if self._reap_worker(pid, timer.signal):
                    self._log_event("kill worker process", timer)
                return

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        """Send a signal to a descendant of this process. Return false if that is not possible."""
        if not self._bind(worker_pid):
            _logger().warning("pid %s has ended, or is not a descendant of this process", worker_pid)
            return False
        return self._signal(worker_pid, signal)

    def _get_requests(self) -> list[FileTimerRequest]:
        records, complaints = self._fifo.read()
        # Count all requests, even those of exited processes, so that the number does not depend on timing.
        self._request_count += len(records)
        for complaint in complaints:
            _logger().warning("%s", complaint)
        return [request for record in records if self._may_ask(request := FileTimerRequest(*record))]

    def _may_ask(self, request: FileTimerRequest) -> bool:
        """Return true if the server may carry out a request: a release, or a timer of a descendant."""
        pid = request.worker_pid
        if request.expiration_time < 0 or self._bind(pid):
            return True
        # Usually, the process has exited. If not, it is no descendant of the server, which must not kill it.
        if not self._has_refused and self.is_process_running(pid):
            self._has_refused = True
            _logger().warning(
                "a timer record was refused (further ones are only dropped): "
                "pid %s is not a descendant of this process",
                pid,
            )
        return False
