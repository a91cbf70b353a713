"""Send the requests of several threads over one session with the coordination store, and wait for replies."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeVar

from elasticrs._engine.nodes.transport.coordination import (
    Changes,
    Connected,
    ConnectionLost,
    Reply,
    Txn,
    Unwatch,
    Watch,
)
from elasticrs._engine.nodes.transport.timed import DistNetworkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticrs._engine.nodes.transport.coordination import Compare, Operation, Request
    from elasticrs._engine.nodes.transport.session import NativeSession


T = TypeVar("T")

_CLOSED = "the store object is closed"


class Requests:
    """Sends requests over a shared session and waits for their replies. Whichever caller waits first receives
    the events for all callers, so no extra thread is needed.

    1. Each reply is passed to the call that sent the request.
    2. A caller that waits for a key misses no put, because this object starts to count puts of the key before
       the caller reads the key.

    Args:
        make: creates the session when it is first needed. Its exceptions are raised in the caller that needed
            the session.
    """

    def __init__(self, make: Callable[[], NativeSession]) -> None:
        self._make: Callable[[], NativeSession] | None = make
        self._session: NativeSession | None = None
        # Use a reentrant lock, because a signal handler may send a request while this thread is connecting.
        self._beginning = threading.RLock()
        self._news = threading.Condition()
        self._is_taking = False
        self._lost: str | None = None
        self._is_connected = False
        self._tag = 0
        self._replies: dict[int, Reply | None] = {}
        self._waiters: dict[str, int] = {}
        self._puts: dict[str, int] = {}

    def connect(self) -> NativeSession:
        """Return the session. The first call opens it and waits until it is connected.

        Raises:
            DistNetworkError: the session could not be opened, or this object is closed.
        """
        with self._beginning:
            if self._make is None:
                raise DistNetworkError(_CLOSED)
            if self._session is None:
                self._session, self._lost, self._is_connected = self._make(), None, False
                try:
                    self._until(lambda: self._is_connected, None)
                except BaseException:
                    self._session.close()
                    self._session = None
                    raise
            return self._session

    def txn(
        self,
        compares: Sequence[Compare] = (),
        then: Sequence[Operation] = (),
        otherwise: Sequence[Operation] = (),
    ) -> Reply:
        """Execute a transaction.

        Raises:
            DistNetworkError: the session ended. The transaction may or may not have been executed.
            ValueError: the transaction is too large.
        """
        return self._ask(lambda tag: Txn(tag, compares, then, otherwise))

    def wait_for(self, find: Callable[[], T | None], keys: Sequence[str], timeout: float) -> T | None:
        """Wait until ``find`` returns a value that is not ``None``, and return this value. ``find`` is called
        again after each put to one of ``keys``. Return ``None`` if ``timeout`` seconds pass first.

        Raises:
            DistNetworkError: the session ended.
        """
        deadline = time.monotonic() + timeout
        if (found := find()) is not None:
            return found
        self._begin_waiting(keys)
        try:
            while True:
                seen = self._count(keys)
                if (found := find()) is not None:
                    return found
                if not self._until(lambda seen=seen: self._count(keys) != seen, deadline):  # type: ignore[misc]
                    return None
        finally:
            self._end_waiting(keys)

    def close(self) -> None:
        """Close the session. Waiting calls raise :class:`DistNetworkError`."""
        with self._beginning:
            # Drop the reference to the session, because the object keeps a descriptor open while it exists.
            session, self._session, self._make = self._session, None, None
        if session is not None:
            session.close()
        with self._news:
            self._lost = self._lost or _CLOSED
            self._news.notify_all()

    def _begin_waiting(self, keys: Sequence[str]) -> None:
        with self._news:
            for key in keys:
                self._waiters[key] = self._waiters.get(key, 0) + 1
                self._puts.setdefault(key, 0)
        for key in keys:
            self._ask(lambda tag, key=key: Watch(tag, key, True, False))  # type: ignore[misc]

    def _end_waiting(self, keys: Sequence[str]) -> None:
        with self._news:
            for key in keys:
                self._waiters[key] -= 1
                if not self._waiters[key]:
                    del self._waiters[key], self._puts[key]
                    if self._session is not None:
                        self._session.send(Unwatch(key, True))

    def _count(self, keys: Sequence[str]) -> int:
        return sum(self._puts[key] for key in keys)

    def _ask(self, make: Callable[[int], Request]) -> Reply:
        session = self.connect()
        with self._news:
            if self._lost is not None:
                raise DistNetworkError(self._lost)
            self._tag += 1
            tag = self._tag
            # Hold the lock while sending, so that a `Watch` from one thread and an `Unwatch` from another are
            # sent in the right order.
            session.send(make(tag))
            self._replies[tag] = None
        try:
            self._until(lambda: self._replies[tag] is not None, None)
        finally:
            with self._news:
                reply = self._replies.pop(tag)
        assert reply is not None
        return reply

    def _until(self, holds: Callable[[], bool], deadline: float | None) -> bool:
        with self._news:
            while not holds():
                if self._lost is not None:
                    raise DistNetworkError(self._lost)
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                if self._is_taking:
                    self._news.wait(left)
                else:
                    self._take(left)
        return True

    def _take(self, timeout: float | None) -> None:
        """Wait for events without holding the lock, then pass them to the waiting callers."""
        session = self._session
        if session is None:
            self._lost = self._lost or _CLOSED
            return
        self._is_taking = True
        self._news.release()
        try:
            session.wait(timeout)
        finally:
            self._news.acquire()
            self._is_taking = False
            self._news.notify_all()
        for event in session.take():
            if isinstance(event, Reply):
                if event.tag in self._replies:
                    self._replies[event.tag] = event
            elif isinstance(event, Changes):
                for change in event.changes:
                    if change.value is not None and change.key in self._puts:
                        self._puts[change.key] += 1
            elif isinstance(event, Connected):
                self._is_connected = True
            elif isinstance(event, ConnectionLost):
                self._lost = event.message
