"""Timer server that reads requests from a FIFO, for programs that run without an elasticrs agent."""

from __future__ import annotations

import math
import os
import select
import time
from threading import Thread

from elasticrs._core import TimerFifo
from elasticrs.timer import file_based_local_timer
from elasticrs.timer.api import _logger
from elasticrs.timer.file_based_local_timer import FileTimerRequest
from elasticrs.timer.local_timer import DescendantTimers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FileTimerServer"]

_MAX_TIMERS = 16384


class FileTimerServer(DescendantTimers):
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
        super().__init__()
        self._file_path = os.fspath(file_path)
        self._run_id = run_id
        self._max_interval = max_interval
        self._daemon = daemon
        self._log_event = log_event or (lambda _name, _request: None)
        self._request_count = 0
        self._has_refused = False
        self._run_once = False
        self._stop_signaled = False
        self._watchdog_thread: Thread | None = None
        self._last_progress_time = int(time.time())
        self._fifo = TimerFifo(self._file_path)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def start(self) -> None:
        """Start the server thread."""
        self._watchdog_thread = Thread(
            target=self._watchdog_loop, name="FileTimerServer", daemon=self._daemon
        )
        self._watchdog_thread.start()
        self._log_event("watchdog started", None)

    def stop(self) -> None:
        """Stop the thread and remove the FIFO. Idempotent."""
        if self._bell != -1:
            self._stop_signaled = True
            self._end()
            self._log_event("watchdog stopped", None)

    def run_once(self) -> None:
        """Process the requests currently in the FIFO, then stop the server."""
        if self._bell != -1:
            self._run_once = True
            self._end()

    def _end(self) -> None:
        os.eventfd_write(self._bell, 1)
        thread, self._watchdog_thread = self._watchdog_thread, None
        if thread is not None:
            thread.join()
        self._fifo.close()
        self._descendants.close()
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

    # --- the thread ---

    def _watchdog_loop(self) -> None:
        while not self._stop_signaled:
            run_once = self._run_once
            try:
                self._wait(0.0 if run_once else min(self._max_interval, self._seconds_until_due()))
                self._run_watchdog()
            except Exception:
                _logger().exception("the timer server could not handle its requests; retrying")
                # Sleep before the next try, because a permanent error would otherwise keep a CPU core busy.
                time.sleep(min(self._max_interval, 0.1))
            self._last_progress_time = int(time.time())
            if run_once:
                return

    def _wait(self, seconds: float) -> None:
        poll = select.poll()
        for fd in (self._fifo.fd, self._bell, *self._descendants.pidfds()):
            poll.register(fd, select.POLLIN)
        poll.poll(math.ceil(seconds * 1000))
        self._forget(self._descendants.forget_the_dead())

    def _run_watchdog(self) -> None:
        # Handle the pending requests first, because they may release or restart timers that are due.
        self.register_timers(self._get_requests())
        all_expired = self.get_expired_timers(self._clock.now())
        file_based_local_timer.log_debug_info_for_expired_timers(
            self._run_id, {pid: [timer.to_json() for timer in timers] for pid, timers in all_expired.items()}
        )
        for pid, timers in all_expired.items():
            self._expire(pid, sorted(timers, key=lambda timer: timer.expiration_time))
        if all_expired:
            self.clear_timers(set(all_expired))

    def _expire(self, pid: int, timers: list[FileTimerRequest]) -> None:
        for timer in timers:
            self._log_event("timer expired", timer)
            if timer.signal > 0:
                if self._reap_worker(pid, timer.signal):
                    self._log_event("kill worker process", timer)
                return

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        """Send a signal to a descendant of this process. Return false if that is not possible."""
        if not self._descendants.bind(worker_pid):
            _logger().warning("pid %s has ended, or is not a descendant of this process", worker_pid)
            return False
        return self._descendants.send(worker_pid, signal)

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
        if request.expiration_time < 0 or self._descendants.bind(pid):
            return True
        # Usually, the sender has exited. If it still exists, it is not a descendant of this process and must
        # not be signalled.
        if not self._has_refused and self.is_process_running(pid):
            self._has_refused = True
            _logger().warning(
                "a timer record was refused (further ones are only dropped): "
                "pid %s is not a descendant of this process",
                pid,
            )
        return False

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        for request in timer_requests:
            key = (request.worker_pid, request.scope_id)
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            elif key in self._timers or len(self._timers) < _MAX_TIMERS:
                request.expiration_time = self._clock.steady(request.expiration_time)
                self._timers[key] = request

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Remove all timers of these processes, and of all processes that have exited."""
        self._forget(
            {pid for pid, _ in self._timers if pid in worker_pids or not self.is_process_running(pid)}
        )
