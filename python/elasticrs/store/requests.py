"""One session with the coordination store, used by several threads that wait for its answers."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from elasticrs.coordination import Changes, Connected, Reply, Txn, Unwatch, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticrs.coordination import Compare, Operation, Session


_CLOSED = "the store object is closed"


class LostError(Exception):
    """The session is over; the text says why."""


class Requests:
    """Sends requests and waits. The first caller that waits takes the events for all; no thread is started.

    1. Each reply goes to the call that asked.
    2. A change of a key that is being waited for is counted before anybody looks at the key again.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._news = threading.Condition()
        self._is_taking = False
        self._lost: str | None = None
        self._is_connected = False
        self._tag = 0
        self._replies: dict[int, Reply | None] = {}
        self._waiters: dict[str, int] = {}
        self._puts: dict[str, int] = {}

    def connect(self) -> None:
        """Wait until the session has begun.

        Raises:
            LostError: there is none.
        """
        self._until(lambda: self._is_connected, None)

    def txn(
        self,
        compares: Sequence[Compare] = (),
        then: Sequence[Operation] = (),
        otherwise: Sequence[Operation] = (),
    ) -> Reply:
        """Carry out a transaction.

        Raises:
            LostError: the session ended; whether the transaction was carried out is not known.
            ValueError: it is too large.
        """
        return self._ask(lambda tag: self._session.send(Txn(tag, compares, then, otherwise)))

    def wait_until(self, holds: Callable[[], bool], keys: Sequence[str], timeout: float) -> bool:
        """Wait until ``holds``, asked again after each put of one of ``keys``; false after ``timeout``.

        Raises:
            LostError: the session ended.
        """
        deadline = time.monotonic() + timeout
        if holds():
            return True
        self._begin_waiting(keys)
        try:
            while True:
                seen = self._count(keys)
                if holds():
                    return True
                if not self._until(partial(self._is_news, keys, seen), deadline):
                    return False
        finally:
            self._end_waiting(keys)

    def close(self) -> None:
        """End the session; calls that wait raise :class:`LostError`."""
        self._session.close()
        with self._news:
            self._lost = self._lost or _CLOSED
            self._news.notify_all()

    def _begin_waiting(self, keys: Sequence[str]) -> None:
        with self._news:
            for key in keys:
                self._waiters[key] = self._waiters.get(key, 0) + 1
                self._puts.setdefault(key, 0)
        for key in keys:
            self._ask(partial(self._watch, key))

    def _watch(self, key: str, tag: int) -> None:
        self._session.send(Watch(tag, key, True, False))

    def _end_waiting(self, keys: Sequence[str]) -> None:
        with self._news:
            for key in keys:
                self._waiters[key] -= 1
                if not self._waiters[key]:
                    del self._waiters[key], self._puts[key]
                    self._session.send(Unwatch(key, True))

    def _is_news(self, keys: Sequence[str], seen: int) -> bool:
        return self._count(keys) != seen

    def _count(self, keys: Sequence[str]) -> int:
        return sum(self._puts[key] for key in keys)

    def _ask(self, send: Callable[[int], None]) -> Reply:
        with self._news:
            if self._lost is not None:
                raise LostError(self._lost)
            self._tag += 1
            tag = self._tag
            # Under the lock: a watch of one thread and the end of a watch of another must not change places.
            send(tag)
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
                    raise LostError(self._lost)
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                if self._is_taking:
                    self._news.wait(left)
                else:
                    self._take(left)
        return True

    def _take(self, timeout: float | None) -> None:
        """Wait for events without holding the lock, and pass them to their callers."""
        self._is_taking = True
        self._news.release()
        try:
            self._session.wait(timeout)
        finally:
            self._news.acquire()
            self._is_taking = False
            self._news.notify_all()
        for event in self._session.take():
            if isinstance(event, Reply):
                if event.tag in self._replies:
                    self._replies[event.tag] = event
            elif isinstance(event, Changes):
                for change in event.changes:
                    if change.value is not None and change.key in self._puts:
                        self._puts[change.key] += 1
            elif isinstance(event, Connected):
                self._is_connected = True
            else:
                self._lost = event.message


class LaterRequests:
    """Like :class:`Requests`, with a session that is made at the first request.

    Args:
        make: the session; whatever it raises is raised by what was asked.
    """

    def __init__(self, make: Callable[[], Session]) -> None:
        self._make: Callable[[], Session] | None = make
        self._lock = threading.Lock()
        self._requests: Requests | None = None

    def txn(
        self,
        compares: Sequence[Compare] = (),
        then: Sequence[Operation] = (),
        otherwise: Sequence[Operation] = (),
    ) -> Reply:
        """See :class:`Requests`."""
        return self._begun().txn(compares, then, otherwise)

    def wait_until(self, holds: Callable[[], bool], keys: Sequence[str], timeout: float) -> bool:
        """See :class:`Requests`."""
        return self._begun().wait_until(holds, keys, timeout)

    def close(self) -> None:
        """See :class:`Requests`."""
        with self._lock:
            # The session keeps a descriptor as long as it is referred to.
            requests, self._requests, self._make = self._requests, None, None
            if requests is not None:
                requests.close()

    def _begun(self) -> Requests:
        with self._lock:
            if self._make is None:
                raise LostError(_CLOSED)
            if self._requests is None:
                requests = Requests(self._make())
                try:
                    requests.connect()
                except BaseException:
                    requests.close()
                    raise
                self._requests = requests
            return self._requests
