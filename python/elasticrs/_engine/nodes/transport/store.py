"""Blocking key-value store with the interface of torch's ``Store``. It does not require torch."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, TypeVar

from elasticrs._engine.nodes.transport.coordination import (
    Delete,
    Exists,
    Get,
    HasValue,
    Missing,
    ModifiedAt,
    Put,
    Range,
)
from elasticrs._engine.nodes.transport.requests import Requests
from elasticrs._engine.nodes.transport.session import Client, NativeSession
from elasticrs._engine.nodes.transport.timed import QueueEmptyError, TimedStore, bytes_of, timed_out

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticrs._engine.nodes.transport.coordination import Compare, Operation, Reply

T = TypeVar("T")

DEFAULT_TIMEOUT = datetime.timedelta(seconds=300)
_LENGTH = 4
"""Size in bytes of the length field before each value of a queue."""


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
    """Connect the client, and return a store that owns it. If connecting fails, close the client.

    Raises:
        DistNetworkError: see :func:`connect`.
    """
    requests = Requests(lambda: NativeSession(client))
    requests.connect()
    return Store(requests, prefix, timeout)


class Store(TimedStore):
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
        super().__init__(timeout)
        self._requests = requests
        self._prefix = prefix

    def clone(self) -> Store:
        """Return another store on the same connection. Closing either one closes both."""
        return Store(self._requests, self._prefix, self._timeout)

    def with_prefix(self, prefix: str) -> Store:
        """Return a store on the same connection, with ``prefix`` appended to this store's prefix."""
        return Store(self._requests, self._prefix + prefix, self._timeout)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = zip(keys, values, strict=True)
        self._txn(then=[Put(self._key(key), bytes_of(value), False) for key, value in pairs])

    def hold(self, key: str) -> None:
        """Set a key to empty bytes, for as long as this connection lasts. Torch's store has no such
        method.
        """
        self._txn(then=[Put(self._key(key), b"", True)])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        def find() -> list[bytes] | None:
            reply = self._txn(then=[Get(self._key(key)) for key in keys])
            values = [_value(reply, index) for index in range(len(keys))]
            found = [value for value in values if value is not None]
            return found if len(found) == len(values) else None

        return self._wait(find, keys, self._timeout)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
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
        """Remove and return the first value of a queue; ``None`` if the queue is empty."""
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
