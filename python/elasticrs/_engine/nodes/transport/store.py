"""Blocking key-value store with the interface of torch's ``Store``. It does not require torch."""

from __future__ import annotations

import datetime
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from elasticrs._engine.nodes.transport.coordination import (
    Changes,
    Client,
    Connected,
    ConnectionLost,
    Delete,
    Exists,
    Get,
    HasValue,
    Missing,
    ModifiedAt,
    NativeSession,
    Put,
    Range,
    Reply,
    Txn,
    Unwatch,
    Watch,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticrs._engine.nodes.transport.coordination import Compare, Operation, Request

T = TypeVar("T")

DEFAULT_TIMEOUT = datetime.timedelta(seconds=300)
_LENGTH = 4
"""Size in bytes of the length field before each value of a queue."""


class DistError(RuntimeError):
    """Base class of store errors. Corresponds to ``torch.distributed.DistError``."""


class DistStoreError(DistError):
    """Raised if a key was not set in time. Corresponds to ``torch.distributed.DistStoreError``."""


class QueueEmptyError(DistStoreError):
    """Raised if the queue is empty. Corresponds to ``torch.distributed.QueueEmptyError``."""


class DistNetworkError(DistError):
    """Raised if the connection to the store is lost. Corresponds to torch's ``DistNetworkError``."""


def bytes_of(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def timed_out(what: str, timeout: datetime.timedelta, rest: str) -> DistStoreError:
    return DistStoreError(f"{what} timeout after {round(timeout.total_seconds() * 1000)}ms, {rest}")


# --- requests of several threads over one session ---

_CLOSED = "the store object is closed"


class Requests:
    """Sends requests over a shared session. Whichever caller waits first receives the events for all callers,
    so no extra thread is needed. A caller that waits for a key misses no put of another process, because it
    starts to count the puts before it reads the key.

    ``make`` creates the session when a caller first needs it. Its exceptions are raised in that caller.
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
        """Return the session. The first call opens it, or raises :class:`DistNetworkError`."""
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
        """Execute a transaction. After :class:`DistNetworkError`, it may or may not have been executed. Raise
        :class:`ValueError` if it is too large.
        """
        return self._ask(lambda tag: Txn(tag, compares, then, otherwise))

    def wait_for(self, find: Callable[[], T | None], keys: Sequence[str], timeout: float) -> T | None:
        """Call ``find`` now and after each put to one of ``keys`` until it returns a value, and return the
        value. Return ``None`` after ``timeout`` seconds. Raise :class:`DistNetworkError` if the session ends.
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
            # Drop the references to the session, because it keeps a file descriptor open while it exists.
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
            # Send under the lock, so that a `Watch` and an `Unwatch` of two threads keep their order.
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


# --- the store ---


def connect(
    host: str,
    port: int,
    run_id: str,
    *,
    prefix: str = "",
    token: bytes | None = None,
    scope: str | None = None,
    timeout: datetime.timedelta = DEFAULT_TIMEOUT,
    connect_timeout: float = 5.0,
) -> Store:
    """Connect to a store.

    Args:
        host: host of the store.
        port: port of the store.
        run_id: id of this run. A store that serves a single run refuses clients of other runs.
        prefix: prefix of every key.
        token: token of the store. With ``scope``, the token that was derived for this scope.
        scope: prefix to which the token restricts the keys; ``None`` for all keys.
        timeout: time limit of :meth:`Store.get` and :meth:`Store.wait`.
        connect_timeout: time limit for connecting, in seconds.

    Raises:
        DistNetworkError: the store could not be reached, or refused the connection.
    """
    client = Client(
        host,
        port,
        run_id=run_id,
        token=token,
        scope=scope,
        connect_timeout=connect_timeout,
        stall_timeout=None,
    )
    return connected(client, prefix, timeout)


def connected(client: Client, prefix: str = "", timeout: datetime.timedelta = DEFAULT_TIMEOUT) -> Store:
    """Return a store that owns ``client``. If it cannot connect, close it and raise ``DistNetworkError``."""
    requests = Requests(lambda: NativeSession(client))
    requests.connect()
    return Store(requests, prefix, timeout)


class Store:
    """Key-value store shared by all clients that use the same server and prefix.

    Values are bytes; text is encoded as UTF-8. All methods may be called from several threads. A key and its
    prefix have at most 1 KiB, and the data of a call at most 1 MiB; otherwise the call raises
    :class:`ValueError`. Unlike in torch, :meth:`add` raises :class:`ValueError` if the value is not a number.
    A ``TCPStore`` closes the connection instead.

    Args:
        requests: requests of a client with ``stall_timeout=None`` that nothing else uses.
        prefix: prefix of every key.
        timeout: time limit of :meth:`get` and :meth:`wait`.

    Raises:
        DistNetworkError: the connection is lost. Every method may raise this.
    """

    def __init__(
        self, requests: Requests, prefix: str = "", timeout: datetime.timedelta = DEFAULT_TIMEOUT
    ) -> None:
        self._timeout = timeout
        self._requests = requests
        self._prefix = prefix

    @property
    def timeout(self) -> datetime.timedelta:
        """Default time limit of blocking operations, such as :meth:`get` and :meth:`wait`."""
        return self._timeout

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set :attr:`timeout`."""
        self._timeout = timeout

    def has_extended_api(self) -> bool:
        """Return true, because the store supports :meth:`append`, :meth:`multi_get` and :meth:`multi_set`."""
        return True

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number under a key and return the sum. A missing key counts as 0."""
        return int(self._change(key, lambda value: str(int(value or b"0") + amount).encode()))

    def append(self, key: str, value: str | bytes) -> None:
        """Append bytes to the value of a key. Create the key if it is missing."""
        tail = bytes_of(value)
        self._change(key, lambda head: head + tail)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        """Wait until a key is set, and return its value.

        Raises:
            DistStoreError: the key was not set within :attr:`timeout`.
        """
        return self.multi_get([key])[0]

    def barrier(self, key: str, world_size: int, timeout: datetime.timedelta | None = None) -> None:
        """Wait until ``world_size`` callers have called this method.

        Args:
            key: key of this barrier. It can be used again once all callers have passed.
            world_size: number of callers.
            timeout: time limit; ``None`` for :attr:`timeout`.

        Raises:
            DistStoreError: the time limit expired.
        """
        come = self.add(f"{key}/come", 1)
        passed = f"{key}/passed/{(come - 1) // world_size}"
        if come % world_size == 0:
            self.set(passed, b"")
        span = self._timeout if timeout is None else timeout
        try:
            self.wait([passed], span)
        except DistStoreError:
            raise timed_out("barrier", span, f"key: {key}") from None

    def clone(self) -> Store:
        """Return another store on the same connection. Closing either one closes both."""
        return Store(self._requests, self._prefix, self._timeout)

    def with_prefix(self, prefix: str) -> Store:
        """Return a store on the same connection, with ``prefix`` appended to this store's prefix."""
        return Store(self._requests, self._prefix + prefix, self._timeout)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys atomically."""
        pairs = zip(keys, values, strict=True)
        self._txn(then=[Put(self._key(key), bytes_of(value), False) for key, value in pairs])

    def hold(self, key: str) -> None:
        """Set a key to empty bytes, and delete it when this connection ends. Torch's store cannot do that."""
        self._txn(then=[Put(self._key(key), b"", True)])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all these keys exist, and return their values, which are read atomically.

        Raises:
            DistStoreError: not all keys were set within :attr:`timeout`.
        """

        def find() -> list[bytes] | None:
            reply = self._txn(then=[Get(self._key(key)) for key in keys])
            values = [_value(reply, index) for index in range(len(keys))]
            found = [value for value in values if value is not None]
            return found if len(found) == len(values) else None

        return self._wait(find, keys, self._timeout)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all these keys exist at the same time, for at most ``timeout``, or :attr:`timeout` if it
        is ``None``.

        Raises:
            DistStoreError: the time limit expired.
        """
        self._wait(lambda: self.check(keys) or None, keys, self._timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return true if all these keys exist."""
        return self._txn([Exists(self._key(key)) for key in keys]).ok

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if its value is ``expected``, or if it is missing and ``expected`` is empty.

        Returns:
            The resulting value of the key. As in torch, it is ``expected`` if the key is missing and was not
            set.
        """
        name, old, new = self._key(key), bytes_of(expected), bytes_of(desired)
        put: list[Operation] = [Put(name, new, False)]
        while True:
            reply = self._txn([HasValue(name, old)], put, [Get(name)])
            if reply.ok:
                return new
            found = _value(reply)
            if found is not None:
                return found
            if old:
                return old
            if self._txn([Missing(name)], put).ok:
                return new

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Add a value to the end of a queue.

        A queue is stored as the value of its key. The key exists only while the queue is not empty. A key
        holds either a queue or a plain value, and the size limit of a value applies to the whole queue.
        """
        item = bytes_of(value)
        self._change(key, lambda queue: queue + len(item).to_bytes(_LENGTH, "big") + item)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first value of a queue. If several callers wait, each value goes to only one
        of them.

        Args:
            key: key of the queue.
            block: true to wait for a value.

        Raises:
            DistStoreError: the queue stayed empty for :attr:`timeout`.
            QueueEmptyError: the queue is empty and ``block`` is false.
            ValueError: the value of the key is not a queue.
        """
        if block:
            return self._wait(lambda: self._take_first(key), [key], self._timeout)
        first = self._take_first(key)
        if first is None:
            raise QueueEmptyError("queue is empty")
        return first

    def queue_len(self, key: str) -> int:
        """Return the number of values in a queue.

        Raises:
            ValueError: the value of the key is not a queue.
        """
        found = _value(self._txn(then=[Get(self._key(key))]))
        return 0 if found is None else len(_items(found))

    def delete_key(self, key: str) -> bool:
        """Delete a key. Return true if it existed."""
        return self._txn(then=[Delete(self._key(key))]).results[0] == 1

    def num_keys(self) -> int:
        """Return the number of keys with this store's prefix."""
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """Return the keys with this store's prefix, in order and with the prefix removed."""
        found = self._txn(then=[Range(self._prefix, 0)]).results[0]
        assert isinstance(found, list)
        return [entry.key[len(self._prefix) :] for entry in found]

    def close(self) -> None:
        """Close the connection, which this store shares with its clones. Idempotent."""
        self._requests.close()

    def _key(self, key: str) -> str:
        return self._prefix + key

    def _txn(
        self,
        compares: Sequence[Compare] = (),
        then: Sequence[Operation] = (),
        otherwise: Sequence[Operation] = (),
    ) -> Reply:
        return self._requests.txn(compares, then, otherwise)

    def _wait(self, find: Callable[[], T | None], keys: Sequence[str], timeout: datetime.timedelta) -> T:
        names = [self._key(key) for key in keys]
        found = self._requests.wait_for(find, names, timeout.total_seconds())
        if found is None:
            raise timed_out("wait", timeout, f"keys: {', '.join(keys)}")
        return found

    def _take_first(self, key: str) -> bytes | None:
        name = self._key(key)
        while True:
            found = self._txn(then=[Get(name)]).entry(0)
            if found is None or found.value is None:
                return None
            first = _items(found.value)[0]
            rest = found.value[_LENGTH + len(first) :]
            step: Operation = Put(name, rest, False) if rest else Delete(name)
            if self._txn([ModifiedAt(name, found.mod_revision)], [step]).ok:
                return first

    def _change(self, key: str, change: Callable[[bytes], bytes]) -> bytes:
        """Set a key to ``change(old value)`` atomically. The old value of a missing key is empty."""
        name = self._key(key)
        found = self._txn(then=[Get(name)]).entry(0)
        while True:
            revision, old = (found.mod_revision, found.value or b"") if found else (0, b"")
            new = change(old)
            reply = self._txn([ModifiedAt(name, revision)], [Put(name, new, False)], [Get(name)])
            if reply.ok:
                return new
            found = reply.entry(0)


def _items(queue: bytes) -> list[bytes]:
    """Split a stored queue into its values. Each value is preceded by its length."""
    items: list[bytes] = []
    at = 0
    while at < len(queue):
        end = at + _LENGTH + int.from_bytes(queue[at : at + _LENGTH], "big")
        items.append(queue[at + _LENGTH : end])
        at = end
    if at != len(queue) or not items:
        raise ValueError("the value of this key is not a queue")
    return items


def _value(reply: Reply, index: int = 0) -> bytes | None:
    entry = reply.entry(index)
    return None if entry is None else entry.value
