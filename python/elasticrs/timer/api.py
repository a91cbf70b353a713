"""What all timers have in common: requests, the interfaces of clients and servers, and :class:`expires`."""

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
    """A worker acquires a timer, or releases it.

    Args:
        worker_id: who; whatever client and server agree on.
        scope_id: the name of the timer, unique for its worker.
        expiration_time: when it is due, in seconds since 1970; negative: release.
    """

    __slots__ = ("expiration_time", "scope_id", "worker_id")
    __hash__ = None  # type: ignore[assignment]  # as for any mutable value

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
    """The worker's side, which sends requests to a server."""

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Start a timer, replacing an earlier one of the same name.

        Args:
            scope_id: its name.
            expiration_time: when it is due, in seconds since 1970.
        """

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """End the timer of this name.

        Args:
            scope_id: its name.
        """


class RequestQueue(ABC):
    """Where a server takes requests from."""

    @abstractmethod
    def size(self) -> int:
        """Return the number of waiting requests; only :meth:`get` takes any."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Take requests.

        Args:
            size: at most so many.
            timeout: seconds to wait for them.
        """


class TimerServer(ABC):
    """Takes requests, and reaps workers whose timers have expired, in a thread of its own.

    Args:
        request_queue: where requests come from.
        max_interval: longest wait for a request, in seconds; timers expire no later than this.
        daemon: whether the thread lets the process end.
    """

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        super().__init__()
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog_thread: threading.Thread | None = None
        self._stop_signaled = False

    @abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Carry out requests; a negative expiration time is a release.

        Args:
            timer_requests: in their order.
        """

    @abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Remove all timers of these workers.

        Args:
            worker_ids: who.
        """

    @abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """The timers that are due, by worker.

        Args:
            deadline: in seconds since 1970; what expires then or earlier is due.
        """

    @abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End a worker.

        Returns:
            Whether that is done; otherwise it is tried again. An exception counts as done.
        """

    def start(self) -> None:
        """Begin to serve, in a thread."""
        from threading import Thread

        self._stop_signaled = False
        self._watchdog_thread = Thread(
            target=self._watchdog_loop, name=type(self).__name__, daemon=self._daemon
        )
        self._watchdog_thread.start()

    def stop(self) -> None:
        """End the thread; waits for it for ``max_interval``. Idempotent."""
        self._stop_signaled = True
        thread, self._watchdog_thread = self._watchdog_thread, None
        if thread is not None:
            thread.join(self._join_limit())

    def _join_limit(self) -> float:
        return self._max_interval

    def _seconds_to_wait(self) -> float:
        """For a request, in the next turn of the loop."""
        return self._max_interval

    def _now(self) -> float:
        """The time that expirations are compared with, in seconds since 1970."""
        return time.time()

    def _watchdog_loop(self) -> None:
        while not self._stop_signaled:
            try:
                self._run_watchdog()
            except Exception:  # noqa: PERF203 -- one turn of many
                _logger().exception("a turn of the timer server failed")
                # What fails at once, and always, must not keep a core busy.
                time.sleep(min(self._max_interval, 0.1))

    def _run_watchdog(self) -> None:
        batch = max(1, self._request_queue.size())
        self.register_timers(self._request_queue.get(batch, self._seconds_to_wait()))
        reaped = set()
        for worker_id, timers in self.get_expired_timers(self._now()).items():
            _logger().info("timers of worker %s expired: %s", worker_id, [t.scope_id for t in timers])
            if self._reap_worker_no_throw(worker_id):
                reaped.add(worker_id)
            else:
                _logger().error("worker %s could not be ended; it is tried again", worker_id)
        self.clear_timers(reaped)

    def _reap_worker_no_throw(self, worker_id: Any) -> bool:
        try:
            return self._reap_worker(worker_id)
        except Exception:
            _logger().exception("worker %s counts as ended, though ending it failed", worker_id)
            return True


_timer_client: TimerClient | None = None


def configure(timer_client: TimerClient) -> None:
    """Choose the client of :class:`expires`, for this process.

    Args:
        timer_client: what tells the server.
    """
    global _timer_client  # noqa: PLW0603 -- what torch's function is for
    _timer_client = timer_client
    from elasticrs._worker.stacks import answer_with_stacks

    answer_with_stacks()


_lock = RLock()
_live: dict[tuple[int, str], list[float]] = {}
"""By client and scope, when the blocks are due that are being executed, in all threads."""

places: dict[tuple[int, str], str] = {}
"""By client and scope, file and line of the last of these blocks; not where they are the scope itself."""


def _forget(key: tuple[int, str]) -> None:
    _live.pop(key, None)
    places.pop(key, None)


def _forget_live() -> None:
    # The blocks are the parent's, and so may be the thread that holds the lock.
    global _lock  # noqa: PLW0603 -- a lock cannot be forced open
    _lock = RLock()
    _live.clear()
    places.clear()


os.register_at_fork(after_in_child=_forget_live)


class expires:  # noqa: N801 -- torch's name
    """A block or function that must end in time: ``with expires(after=60): …``, ``@expires(after=60)``.

    When it does not, the server may end this worker. Blocks can be nested, may be entered again (a
    recursive function, several threads), and let exceptions pass. Of several blocks with the same scope the
    earliest deadline counts.

    Different from torch: without a scope, the caller's line is named. (There it is a line of
    ``contextlib``, the same for all, so that an inner block ends the timer of the outer one.)

    Args:
        after: seconds from the moment at which the block is entered.
        scope: the timer's name; ``FILE#LINE`` of the caller when ``None``.
        client: tells the server; that of :func:`configure` when ``None``.

    Raises:
        RuntimeError: there is no client.
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
        """Let every call of a function be such a block."""
        from functools import wraps

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            block = expires(self._after, self._scope, self._client)
            block._at = self._at
            with block:
                return function(*args, **kwargs)

        return timed  # type: ignore[return-value]


class SteadyClock:
    """Wall clock time that does not step: what it was at the start, and what has passed since."""

    __slots__ = ("_monotonic", "_wall")

    TOLERANCE = 0.05
    """Seconds of difference that are no step: reading two clocks takes a moment."""

    def __init__(self) -> None:
        self._wall, self._monotonic = time.time(), time.monotonic()

    def now(self) -> float:
        """Seconds since 1970, as they would be without a step."""
        return self._wall + time.monotonic() - self._monotonic

    def steady(self, expiration_time: float) -> float:
        """Give an expiration that was just read from the wall clock, in seconds since 1970, on this one."""
        step = time.time() - self.now()
        return expiration_time if abs(step) < self.TOLERANCE else expiration_time - step


def _logger() -> Any:
    from logging import getLogger

    return getLogger("elasticrs.timer")
