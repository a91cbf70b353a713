"""Common parts of all timers: requests, :class:`expires`, and the client and server interfaces."""

from __future__ import annotations

import os
import sys
import time
from _thread import RLock, get_ident
from abc import ABC, abstractmethod

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, TypeVar

    F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]


class TimerRequest:
    """Request from a worker to start or release a timer.

    Args:
        worker_id: identity of the worker, in any form on which client and server agree.
        scope_id: name of the timer, unique within its worker.
        expiration_time: expiration in seconds since 1970; a negative number releases the timer.
    """

    __slots__ = ("expiration_time", "scope_id", "worker_id")
    __hash__ = None  # type: ignore[assignment] # mutable, so not hashable

    def __init__(self, worker_id: Any, scope_id: str, expiration_time: float) -> None:
        self.worker_id = worker_id
        self.scope_id = scope_id
        self.expiration_time = expiration_time

    def __eq__(self, other: object) -> bool:
        names = TimerRequest.__slots__
        return isinstance(other, TimerRequest) and all(getattr(self, n) == getattr(other, n) for n in names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.worker_id!r}, {self.scope_id!r}, {self.expiration_time!r})"


class TimerClient(ABC):
    """Client side of a timer, used by workers to send requests to a server."""

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Start or restart a timer. It expires at ``expiration_time``, in seconds since 1970."""

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """Stop the timer with this name."""


class RequestQueue(ABC):
    """Source from which a timer server takes requests."""

    @abstractmethod
    def size(self) -> int:
        """Return the number of pending requests, without removing any."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Remove and return at most ``size`` requests, waiting up to ``timeout`` seconds."""


class Watchdog(ABC):
    """Thread of a timer server."""

    def __init__(self, max_interval: float, daemon: bool) -> None:
        super().__init__()
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog_thread: threading.Thread | None = None
        self._stop_signaled = False

    @abstractmethod
    def _run_watchdog(self) -> None:
        """Wait for requests that set or release timers, handle them, and stop workers whose time is over."""

    def start(self) -> None:
        """Start the server thread."""
        from threading import Thread

        self._stop_signaled = False
        self._watchdog_thread = Thread(
            target=self._watchdog_loop, name=type(self).__name__, daemon=self._daemon
        )
        self._watchdog_thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait at most ``max_interval`` seconds for it to finish. Idempotent."""
        self._stop_signaled = True
        thread, self._watchdog_thread = self._watchdog_thread, None
        if thread is not None:
            thread.join(self._join_limit())

    def _join_limit(self) -> float | None:
        return self._max_interval

    def _seconds_to_wait(self) -> float:
        """Return how many seconds the next loop iteration may wait for a request."""
        return self._max_interval

    def _watchdog_loop(self) -> None:
        while not self._stop_signaled:
            try:
                self._run_watchdog()
            except Exception:  # noqa: PERF203 -- the loop must continue
                _logger().exception("the timer server could not handle its requests; retrying")
                # Sleep before the next try, because a permanent error would otherwise keep a CPU core busy.
                time.sleep(min(self._max_interval, 0.1))


class TimerServer(Watchdog):
    """Base class of timer servers, with a thread that kills workers whose timers have expired.

    Args:
        request_queue: source of requests.
        max_interval: seconds after which an expired timer is noticed at the latest.
        daemon: true if the process may exit while the thread runs.
    """

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        super().__init__(max_interval, daemon)
        self._request_queue = request_queue

    @abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Handle the requests in order. A negative expiration time releases the timer, any other sets it."""

    @abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Remove all timers of these workers."""

    @abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """Return the timers that expire at ``deadline`` (seconds since 1970) or earlier, by worker."""

    @abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """Kill a worker. After a false result, the server retries; after an exception, it does not."""

    def _now(self) -> float:
        """Return the current time in seconds since 1970, to compare with expiration times."""
        return time.time()

    def _run_watchdog(self) -> None:
        batch = max(1, self._request_queue.size())
        self.register_timers(self._request_queue.get(batch, self._seconds_to_wait()))
        reaped = set()
        for worker_id, timers in self.get_expired_timers(self._now()).items():
            _logger().info("timers of worker %s expired: %s", worker_id, [t.scope_id for t in timers])
            if self._reap_worker_no_throw(worker_id):
                reaped.add(worker_id)
            else:
                _logger().error("worker %s could not be stopped; retrying", worker_id)
        self.clear_timers(reaped)

    def _reap_worker_no_throw(self, worker_id: Any) -> bool:
        try:
            return self._reap_worker(worker_id)
        except Exception:
            _logger().exception("worker %s could not be stopped and is considered dead", worker_id)
            return True


_timer_client: TimerClient | None = None


def configure(timer_client: TimerClient) -> None:
    """Set the client that :class:`expires` uses in this process."""
    global _timer_client  # noqa: PLW0603 -- process-wide, as in torch
    _timer_client = timer_client
    from elasticrs._engine.inside.flight import answer_with_stacks

    answer_with_stacks()


_lock = RLock()
_live: dict[tuple[int, str], list[float]] = {}
"""Deadlines of the running blocks of all threads, by client and scope."""

places: dict[tuple[int, str], str] = {}
"""``FILE#LINE`` of the last entered block, by client and scope; missing if the scope is that text itself."""


def _forget(key: tuple[int, str]) -> None:
    _live.pop(key, None)
    places.pop(key, None)


def _forget_live() -> None:
    # Forget the parent's blocks. Replace the lock, which a thread that exists only there may hold.
    global _lock  # noqa: PLW0603 -- a held lock has to be replaced
    _lock = RLock()
    _live.clear()
    places.clear()


os.register_at_fork(after_in_child=_forget_live)


class expires:  # noqa: N801 -- torch's name
    """Time limit for a block or function: ``with expires(after=60): …``, ``@expires(after=60)``.

    When it expires, the server may kill this worker. Blocks can be nested, and entered again by recursive
    functions or several threads. Of blocks with the same scope, the earliest deadline applies. In torch, all
    blocks have the same default scope, and an inner block stops the timer of the outer one.

    Args:
        after: time limit in seconds, from the start of the block.
        scope: name of the timer; ``None`` for ``FILE#LINE`` of the caller.
        client: client that sends requests to the server; ``None`` for the client set by :func:`configure`.

    Raises:
        RuntimeError: no client was passed or configured.
    """

    __slots__ = ("_after", "_at", "_client", "_entered", "_scope")

    def __init__(self, after: float, scope: str | None = None, client: TimerClient | None = None) -> None:
        self._after = after
        self._client = client
        self._entered: dict[int, list[tuple[TimerClient, float]]] = {}
        frame = sys._getframe(1)
        file, line = frame.f_code.co_filename, frame.f_lineno
        self._scope = f"{file}#{line}" if scope is None else scope
        self._at = None if scope is None else f"{file.rpartition('/')[2]}#{line}"

    def __enter__(self) -> None:
        client = self._client if self._client is not None else _timer_client
        if client is None:
            raise RuntimeError("there is no timer client: call elasticrs.timer.configure first")
        expiration = time.time() + self._after
        key = (id(client), self._scope)
        with _lock:
            due = _live.setdefault(key, [])
            due.append(expiration)
            if self._at is not None:
                places[key] = self._at
            try:
                client.acquire(self._scope, min(due))
            except BaseException:
                due.remove(expiration)
                if not due:
                    _forget(key)
                raise
            self._entered.setdefault(get_ident(), []).append((client, expiration))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _lock:
            entered = self._entered[get_ident()]
            client, expiration = entered.pop()
            if not entered:
                del self._entered[get_ident()]
            key = (id(client), self._scope)
            due = _live.get(key, [])
            if expiration in due:
                due.remove(expiration)
            if due:
                client.acquire(self._scope, min(due))
                return
            _forget(key)
            client.release(self._scope)

    def __call__(self, function: F) -> F:
        """Decorate a function so that this time limit applies to every call."""
        from functools import wraps

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            block = expires(self._after, self._scope, self._client)
            block._at = self._at
            with block:
                return function(*args, **kwargs)

        return timed  # type: ignore[return-value]


class SteadyClock:
    """Clock that starts with the time of the wall clock, but ignores later changes to it."""

    __slots__ = ("_monotonic", "_wall")

    TOLERANCE = 0.05
    """Difference between the two clocks, in seconds, that does not count as a change, because they cannot be
    read at the same instant.
    """

    def __init__(self) -> None:
        self._wall, self._monotonic = time.time(), time.monotonic()

    def now(self) -> float:
        """Return the seconds since 1970, unaffected by wall-clock steps."""
        return self._wall + time.monotonic() - self._monotonic

    def steady(self, expiration_time: float) -> float:
        """Convert an expiration time to this clock. It must just have been computed from the wall clock."""
        step = time.time() - self.now()
        return expiration_time if abs(step) < self.TOLERANCE else expiration_time - step


def _logger() -> Any:
    from logging import getLogger

    return getLogger("elasticrs.timer")
