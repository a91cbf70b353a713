"""What every store of ours has in common: torch's errors, a time-out, a barrier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datetime
    from collections.abc import Sequence


class DistError(RuntimeError):
    """As ``torch.distributed.DistError``."""


class DistStoreError(DistError):
    """A key did not come in time; as ``torch.distributed.DistStoreError``."""


class QueueEmptyError(DistStoreError):
    """A queue has nothing to take; as ``torch.distributed.QueueEmptyError``."""


class DistNetworkError(DistError):
    """The connection to the store is lost; as ``torch.distributed.DistNetworkError``."""


def bytes_of(value: str | bytes) -> bytes:
    """Return a value as it is stored."""
    return value.encode() if isinstance(value, str) else bytes(value)


def timed_out(what: str, timeout: datetime.timedelta, rest: str) -> DistStoreError:
    """Return the error of what took too long."""
    return DistStoreError(f"{what} timeout after {round(timeout.total_seconds() * 1000)}ms, {rest}")


class TimedStore(ABC):
    """A store whose :meth:`get` and :meth:`wait` wait, for ``timeout`` where nothing else is said."""

    def __init__(self, timeout: datetime.timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> datetime.timedelta:
        """How long :meth:`get` and :meth:`wait` wait."""
        return self._timeout

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Change :attr:`timeout`."""
        self._timeout = timeout

    def has_extended_api(self) -> bool:
        """True: :meth:`append`, :meth:`multi_get` and :meth:`multi_set` work."""
        return True

    @abstractmethod
    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys at once: nobody sees only some of them."""

    @abstractmethod
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several keys and return their values, as they were at one moment.

        Raises:
            DistStoreError: not all came within :attr:`timeout`.
        """

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all these keys are there at one moment, for :attr:`timeout` when ``None``.

        Raises:
            DistStoreError: not all came in time.
        """

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 when the key is missing, and return the sum."""

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value.

        Raises:
            DistStoreError: it did not come within :attr:`timeout`.
        """
        return self.multi_get([key])[0]

    def barrier(self, key: str, world_size: int, timeout: datetime.timedelta | None = None) -> None:
        """Wait until a number of callers have called this.

        Args:
            key: of this barrier; may be used again when all have passed.
            world_size: how many.
            timeout: :attr:`timeout` when ``None``.

        Raises:
            DistStoreError: not all came in time.
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
