"""Common parts of all stores: errors that mirror torch's, a timeout, and a barrier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Sequence


class DistError(RuntimeError):
    """Base class of store errors. Corresponds to ``torch.distributed.DistError``."""


class DistStoreError(DistError):
    """Raised if a key was not set in time. Corresponds to ``torch.distributed.DistStoreError``."""


class QueueEmptyError(DistStoreError):
    """Raised if the queue is empty. Corresponds to ``torch.distributed.QueueEmptyError``."""


class DistNetworkError(DistError):
    """Raised if the connection to the store is lost. Corresponds to
    ``torch.distributed.DistNetworkError``.
    """


def bytes_of(value: str | bytes) -> bytes:
    """Convert a value to the bytes to be stored."""
    return value.encode() if isinstance(value, str) else bytes(value)


def timed_out(what: str, timeout: datetime.timedelta, rest: str) -> DistStoreError:
    """Return the error for an operation that took too long."""
    return DistStoreError(f"{what} timeout after {round(timeout.total_seconds() * 1000)}ms, {rest}")


class TimedStore(ABC):
    """Base class of stores. ``timeout`` is the default time limit of blocking operations."""

    def __init__(self, timeout: datetime.timedelta) -> None:
        self._timeout = timeout

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

    @abstractmethod
    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys atomically."""

    @abstractmethod
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all these keys exist, and return their values, which are read atomically.

        Raises:
            DistStoreError: not all keys were set within :attr:`timeout`.
        """

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all these keys exist at the same time, for at most ``timeout``, or :attr:`timeout` if it
        is ``None``.

        Raises:
            DistStoreError: the time limit expired.
        """

    @abstractmethod
    def _change(self, key: str, change: Callable[[bytes], bytes]) -> bytes:
        """Atomically replace the value of a key with ``change(old value)``. The old value is empty bytes if
        the key is missing. Return the new value.
        """

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number stored under a key and return the sum. A missing key is
        treated as 0.
        """
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
