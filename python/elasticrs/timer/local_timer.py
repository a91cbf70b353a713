"""Timers over a ``multiprocessing.Queue``. All workers must be descendants of the server's process."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` would import more modules
import os
import time

from elasticrs._engine.process.other_processes import started_at, stat_fields
from elasticrs.timer.api import (
    RequestQueue,
    SteadyClock,
    TimerClient,
    TimerRequest,
    TimerServer,
    Watchdog,
    _logger,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]

_SLICE = 1.0
_MAX_TIMERS = 16384


class DescendantServer(Watchdog):
    """Base class of timer servers that run without an agent. A server kills only descendants of its own
    process. It keeps the running timers by pid and scope (the timer's name), and a pidfd for each process
    with a timer, because the kernel may give the pid of an exited process to a new one.
    """

    def __init__(self, *how: Any) -> None:
        super().__init__(*how)
        self._timers: dict[tuple[Any, str], Any] = {}
        self._pidfds: dict[int, int] = {}
        self._clock = SteadyClock()

    def register_timers(self, timer_requests: list[Any]) -> None:
        self._forget_the_dead()
        for request in timer_requests:
            key = (request.worker_id, request.scope_id)
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            elif key in self._timers or len(self._timers) < _MAX_TIMERS:
                # Keep the timer even if no pidfd can be opened, so that its expiration is at least logged.
                self._bind(request.worker_id, getattr(request, "start_time", 0))
                request.expiration_time = self._clock.steady(request.expiration_time)
                self._timers[key] = request

    def clear_timers(self, worker_ids: set[Any]) -> None:
        for key in [key for key in self._timers if key[0] in worker_ids]:
            del self._timers[key]

    def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
        expired: dict[Any, list[Any]] = {}
        for (pid, _), timer in self._timers.items():
            if timer.expiration_time <= deadline:
                expired.setdefault(pid, []).append(timer)
        return expired

    def _now(self) -> float:
        return self._clock.now()

    def _seconds_to_wait(self) -> float:
        soonest = min((timer.expiration_time for timer in self._timers.values()), default=float("inf"))
        return min(self._max_interval, max(0.0, soonest - self._clock.now()))

    def _bind(self, pid: int, started: int = 0) -> bool:
        """Open and hold a pidfd for a descendant. Return false if ``pid`` is not a running descendant that
        started at this time (0: any time).
        """
        if pid not in self._pidfds:
            try:
                pidfd = os.pidfd_open(pid)
            except (OSError, OverflowError, TypeError, ValueError):
                return False
            if not descends_from_us(pid) or started not in (0, started_at(str(pid))):
                os.close(pidfd)
                return False
            self._pidfds[pid] = pidfd
        return True

    def _signal(self, pid: int, signum: int) -> bool:
        """Send a signal to a process whose pidfd is held. Return true even if it has exited."""
        from signal import pidfd_send_signal

        try:
            pidfd_send_signal(self._pidfds[pid], signum)
        except ProcessLookupError:
            _logger().info("pid %s has already exited", pid)
        except OSError:
            _logger().exception("pid %s could not be signalled", pid)
            return False
        return True

    def _forget_the_dead(self) -> None:
        """Remove the timers and close the pidfds of all processes that have exited."""
        from select import POLLIN, poll

        watch = poll()
        for pidfd in self._pidfds.values():
            watch.register(pidfd, POLLIN)
        ended = {pidfd for pidfd, _ in watch.poll(0)}
        dead = {pid for pid, pidfd in self._pidfds.items() if pidfd in ended}
        for pid in dead:
            os.close(self._pidfds.pop(pid))
        self._timers = {key: timer for key, timer in self._timers.items() if key[0] not in dead}

    def _close_pidfds(self) -> None:
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])


def descends_from_us(pid: int) -> bool:
    """Return true for a live descendant of the current process, but not for the current process itself."""
    own = os.getpid()
    for _ in range(64):
        if pid <= 1 or pid == own:
            return False
        fields = stat_fields(str(pid))
        if not fields:
            return False
        parent = int(fields[1])
        if parent == own:
            # A process of which only the main thread has exited looks like a zombie, so count its threads.
            return fields[0] not in (b"Z", b"X") or int(fields[17]) > 1
        pid = parent
    return False


class LocalTimerRequest(TimerRequest):
    """Timer request with its sender's start time, which shows whether the pid has been reused since."""

    __slots__ = ("start_time",)
    __hash__ = None  # mutable, so not hashable

    def __init__(self, worker_id: int, scope_id: str, expiration_time: float, start_time: int) -> None:
        super().__init__(worker_id, scope_id, expiration_time)
        self.start_time = start_time


class LocalTimerClient(TimerClient):
    """Timer client for :class:`LocalTimerServer`, with the server's ``multiprocessing.Queue``."""

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        request = LocalTimerRequest(os.getpid(), scope_id, expiration_time, started_at("self"))
        self._mp_queue.put(request)

    def release(self, scope_id: str) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """Request queue that reads from a ``multiprocessing.Queue``."""

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue

    def size(self) -> int:
        return int(self._mp_queue.qsize())

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        from queue import Empty

        requests: list[TimerRequest] = []
        deadline = time.monotonic() + timeout
        try:
            while len(requests) < size:
                requests.append(self._mp_queue.get(timeout=max(0.0, deadline - time.monotonic())))
        except Empty:
            return requests
        return requests


class LocalTimerServer(DescendantServer, TimerServer):
    """Kills descendants of this process whose timers have expired, but never this process itself.

    Unlike in torch, a timer expires when it is due. Steps of the wall clock have no effect. The timers of a
    process are removed when it exits, because its pid may be reused.

    Args:
        mp_queue: ``multiprocessing.Queue`` of the clients.
        max_interval: maximum number of seconds to wait for a request.
        daemon: true if the process may exit while the thread runs.
    """

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)

    def stop(self) -> None:
        thread = self._watchdog_thread
        super().stop()
        if thread is None or not thread.is_alive():
            self._close_pidfds()

    def _reap_worker(self, worker_id: int) -> bool:
        if worker_id not in self._pidfds:
            _logger().info(
                "pid %s is not killed, because it has exited or is no descendant of this process", worker_id
            )
            return True
        return self._signal(worker_id, _signal.SIGKILL)

    def _join_limit(self) -> float:
        return max(self._max_interval, 2 * _SLICE)

    def _seconds_to_wait(self) -> float:
        # Limit the wait, because only a request can interrupt it, and the server has to stop promptly.
        return min(super()._seconds_to_wait(), _SLICE)
