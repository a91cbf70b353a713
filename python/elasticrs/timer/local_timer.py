"""Timer client and server that communicate through a ``multiprocessing.Queue``. All workers must be
descendants of the server's process.
"""

from __future__ import annotations

import os
import time

from elasticrs._engine.process.procfs import started_at
from elasticrs.timer.api import RequestQueue, TimerClient, TimerRequest, TimerServer, _logger
from elasticrs.timer.descendants import DescendantTimers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]

_SIGKILL = 9
_SLICE = 1.0


class LocalTimerRequest(TimerRequest):
    """Timer request with the pid and the start time of its sender. The start time shows whether the pid has
    been reused since the request was sent.
    """

    __slots__ = ("start_time",)
    __hash__ = None  # mutable, so not hashable

    def __init__(self, worker_id: int, scope_id: str, expiration_time: float, start_time: int) -> None:
        super().__init__(worker_id, scope_id, expiration_time)
        self.start_time = start_time


class LocalTimerClient(TimerClient):
    """Timer client for :class:`LocalTimerServer`.

    Args:
        mp_queue: ``multiprocessing.Queue`` of the server.
    """

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        request = LocalTimerRequest(os.getpid(), scope_id, expiration_time, started_at("self"))
        self._mp_queue.put(request)

    def release(self, scope_id: str) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """Request queue that reads from a ``multiprocessing.Queue``.

    Args:
        mp_queue: queue to read from.
    """

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


class LocalTimerServer(DescendantTimers, TimerServer):
    """Timer server that kills descendants of this process whose timers have expired.

    Differences from torch: a timer expires when it is due, not up to ``max_interval`` later. Steps of the
    wall clock have no effect. Only descendants of this process are ever signalled, never this process itself.
    The timers of a process are removed when it exits, so that another process that gets the same pid is not
    affected.

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
            self._descendants.close()

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        self._forget(self._descendants.forget_the_dead())
        for request in timer_requests:
            key = (request.worker_id, request.scope_id)
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            else:
                # Keep the timer even if no pidfd can be opened, so that its expiration is at least logged.
                self._descendants.bind(request.worker_id, getattr(request, "start_time", 0))
                request.expiration_time = self._clock.steady(request.expiration_time)
                self._timers[key] = request

    def clear_timers(self, worker_ids: set[int]) -> None:
        self._forget(worker_ids)

    def _reap_worker(self, worker_id: int) -> bool:
        if not self._descendants.holds(worker_id):
            _logger().info(
                "pid %s is not killed, because it has exited or is no descendant of this process", worker_id
            )
            return True
        return self._descendants.send(worker_id, _SIGKILL)

    def _join_limit(self) -> float:
        return max(self._max_interval, 2 * _SLICE)

    def _seconds_to_wait(self) -> float:
        # Keep the wait short so that the server stops promptly, because only a request can interrupt the
        # wait.
        return min(self._max_interval, self._seconds_until_due(), _SLICE)

    def _now(self) -> float:
        return self._clock.now()
