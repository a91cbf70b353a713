"""A prefix for the keys of any store."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datetime
    from collections.abc import Sequence


def with_prefix(store: Any, prefix: str) -> Any:
    """The store, with a prefix and a slash before every key, as torch's ``PrefixStore``.

    Args:
        store: torch's, ours, or anything with the same methods.
        prefix: for the keys.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(store, distributed.Store):
        # Torch's own functions take nothing else.
        return distributed.PrefixStore(prefix, store)
    return PrefixStore(prefix, store)


class PrefixStore:
    """Puts a prefix before every key.

    Args:
        prefix: with a slash after it.
        store: anything with the methods of torch's ``Store`` that are called.
    """

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix = f"{prefix}/"
        self._store = store

    @property
    def underlying_store(self) -> Any:
        """The store."""
        return self._store

    @property
    def timeout(self) -> datetime.timedelta:
        """Of the store."""
        timeout: datetime.timedelta = self._store.timeout
        return timeout

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Change the timeout of the store."""
        self._store.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        """True if the store has :meth:`append`, :meth:`multi_get` and :meth:`multi_set`."""
        return bool(self._store.has_extended_api())

    def set(self, key: str, value: str | bytes) -> None:
        """See :class:`elasticrs.store.Store`."""
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """See :class:`elasticrs.store.Store`."""
        value: bytes = self._store.get(self._prefix + key)
        return value

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """See :class:`elasticrs.store.Store`."""
        self._store.multi_set(self._keys(keys), values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See :class:`elasticrs.store.Store`."""
        values: list[bytes] = self._store.multi_get(self._keys(keys))
        return values

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """See :class:`elasticrs.store.Store`."""
        if timeout is None:
            self._store.wait(self._keys(keys))
        else:
            self._store.wait(self._keys(keys), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """See :class:`elasticrs.store.Store`."""
        return bool(self._store.check(self._keys(keys)))

    def add(self, key: str, amount: int) -> int:
        """See :class:`elasticrs.store.Store`."""
        return int(self._store.add(self._prefix + key, amount))

    def append(self, key: str, value: str | bytes) -> None:
        """See :class:`elasticrs.store.Store`."""
        self._store.append(self._prefix + key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """See :class:`elasticrs.store.Store`."""
        value: bytes = self._store.compare_set(self._prefix + key, expected, desired)
        return value

    def queue_push(self, key: str, value: str | bytes) -> None:
        """See :class:`elasticrs.store.Store`."""
        self._store.queue_push(self._prefix + key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """See :class:`elasticrs.store.Store`."""
        value: bytes = self._store.queue_pop(self._prefix + key, block)
        return value

    def queue_len(self, key: str) -> int:
        """See :class:`elasticrs.store.Store`."""
        return int(self._store.queue_len(self._prefix + key))

    def barrier(self, key: str, world_size: int, timeout: datetime.timedelta | None = None) -> None:
        """See :class:`elasticrs.store.Store`."""
        self._store.barrier(self._prefix + key, world_size, timeout)

    def delete_key(self, key: str) -> bool:
        """See :class:`elasticrs.store.Store`."""
        return bool(self._store.delete_key(self._prefix + key))

    def num_keys(self) -> int:
        """Return the number of keys in the whole store, as torch does."""
        return int(self._store.num_keys())

    def _keys(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]
