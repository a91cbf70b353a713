"""Timers over a ``multiprocessing.Queue``, for workers that are descendants of the server's process."""

from __future__ import annotations

import os
import time

from elasticrs.timer.api import (
    RequestQueue,
    SteadyClock,
    TimerClient,
    TimerRequest,
    TimerServer,
    _logger,
    descends_from_us,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]

_SIGKILL = 9
_SLICE = 1.0


class LocalTimerClient(TimerClient):
    """The worker's side of :class:`LocalTimerServer`.

    Args:
        mp_queue: a ``multiprocessing.Queue``, the one of the server.
    """

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """See the base class."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        """See the base class."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """Requests from a ``multiprocessing.Queue``.

    Args:
        mp_queue: the queue.
    """

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue

    def size(self) -> int:
        """See the base class."""
        return int(self._mp_queue.qsize())

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """See the base class."""
        from queue import Empty

        requests: list[TimerRequest] = []
        deadline = time.monotonic() + timeout
        try:
            while len(requests) < size:
                requests.append(self._mp_queue.get(timeout=max(0.0, deadline - time.monotonic())))
        except Empty:
            return requests
        return requests


class LocalTimerServer(TimerServer):
    """Kills descendants of this process whose timers have expired.

    Different from torch: a timer expires when it is due, not up to ``max_interval`` later; steps of the wall
    clock do not count; and only descendants of this process are ever signalled, never itself.

    Args:
        mp_queue: a ``multiprocessing.Queue``, the one of the clients.
        max_interval: longest wait for a request, in seconds.
        daemon: whether the thread lets the process end.
    """

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)
        self._timers: dict[tuple[int, str], TimerRequest] = {}
        self._clock = SteadyClock()

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """See the base class."""
        for request in timer_requests:
            key = (request.worker_id, request.scope_id)
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            else:
                request.expiration_time = self._clock.steady(request.expiration_time)
                self._timers[key] = request

    def clear_timers(self, worker_ids: set[int]) -> None:
        """See the base class."""
        self._timers = {key: timer for key, timer in self._timers.items() if key[0] not in worker_ids}

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """See the base class."""
        expired: dict[Any, list[TimerRequest]] = {}
        for timer in self._timers.values():
            if timer.expiration_time <= deadline:
                expired.setdefault(timer.worker_id, []).append(timer)
        return expired

    def _reap_worker(self, worker_id: int) -> bool:
        if not descends_from_us(worker_id):
            _logger().info(
                "pid %s has ended, or is no descendant of this process; it is left alone", worker_id
            )
            return True
        try:
            os.kill(worker_id, _SIGKILL)
        except ProcessLookupError:
            return True
        except OSError:
            _logger().exception("pid %s could not be killed", worker_id)
            return False
        return True

    def _join_limit(self) -> float:
        return max(self._max_interval, 2 * _SLICE)

    def _seconds_to_wait(self) -> float:
        # Nothing but a request wakes the queue's reader, and a stop must not take a minute.
        soonest = min((timer.expiration_time for timer in self._timers.values()), default=float("inf"))
        return max(0.0, min(self._max_interval, soonest - self._now(), _SLICE))

    def _now(self) -> float:
        return self._clock.now()
