"""Key-value store in etcd, with the same class name as in torch. If torch is installed, the class is a
subclass of ``torch.distributed.Store``.

The methods call those of :class:`elasticrs.store.Store`. This module adds only the behavior in which torch's
class differs from that store. Agents do not import this module.
"""

from __future__ import annotations

import functools
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any

from elasticrs.job.value import Value
from elasticrs.rendezvous.etcd_client import EtcdClient
from elasticrs.store.coordination import HasValue, Put, Reply
from elasticrs.store.requests import Requests
from elasticrs.store.store import DEFAULT_TIMEOUT, Store
from elasticrs.store.timed import DistStoreError

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Sequence

    from elasticrs.store.coordination import Compare, Operation, Result

    _Base = object
else:
    try:
        from torch.distributed import Store as _Base
    except ImportError:
        _Base = object

__all__ = ["EtcdStore"]


class KeyNotFoundError(DistStoreError, LookupError):
    """Raised if a key was not set in time. It is also a ``LookupError``, because torch's store raises that
    error.
    """


class _Entry(Value):
    key: str
    value: bytes | None
    create_revision: int
    mod_revision: int


class _Base64Store(Store):
    """Store that encodes keys and values as base64 in etcd, as torch does."""

    def _key(self, key: str) -> str:
        return self._prefix + b64encode(key.encode()).decode()

    def _txn(
        self,
        compares: Sequence[Compare] = (),
        then: Sequence[Operation] = (),
        otherwise: Sequence[Operation] = (),
    ) -> Reply:
        steps = [[_step(each) for each in steps] for steps in (compares, then, otherwise)]
        reply = super()._txn(*steps)  # type: ignore[arg-type]
        return Reply(reply.tag, reply.ok, reply.revision, [self._result(each) for each in reply.results])

    def _result(self, result: Result) -> Result:
        if result is None or isinstance(result, int):
            return result
        if isinstance(result, list):
            return [self._result(each) for each in result]  # type: ignore[misc]
        found: Any = result
        name = b64decode(found.key.removeprefix(self._prefix)).decode()
        value = None if found.value is None else b64decode(found.value)
        return _Entry(self._prefix + name, value, found.create_revision, found.mod_revision)


def _step(step: Compare | Operation) -> Compare | Operation:
    return step.replaced(value=b64encode(step.value)) if isinstance(step, (HasValue, Put)) else step


class EtcdStore(_Base):
    """Key-value store in etcd. All stores with the same prefix see the same keys.

    Args:
        etcd_client: an :class:`EtcdClient`, or a client of python-etcd, of which only the address and
            protocol are used.
        etcd_store_prefix: prefix of all keys.
        timeout: time limit of :meth:`get` and :meth:`wait`; 300 s if ``None``.

    Raises:
        DistNetworkError: etcd does not answer. Every method may raise this error.
    """

    def __init__(
        self, etcd_client: Any, etcd_store_prefix: str, timeout: datetime.timedelta | None = None
    ) -> None:
        super().__init__()
        self.client = etcd_client
        self.prefix = etcd_store_prefix if etcd_store_prefix.endswith("/") else f"{etcd_store_prefix}/"
        requests = Requests(EtcdClient.of(etcd_client, self.prefix).session)
        self._store = _Base64Store(requests, self.prefix, timeout or DEFAULT_TIMEOUT)

    @property
    def timeout(self) -> datetime.timedelta:
        """Time limit of :meth:`get` and :meth:`wait`."""
        return self._store.timeout

    def get(self, key: str) -> bytes:
        """Wait until a key is set, and return its value.

        Raises:
            LookupError: the key was not set within :attr:`timeout`.
        """
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several keys and return their values.

        Raises:
            LookupError: not all keys were set within :attr:`timeout`.
        """
        try:
            return self._store.multi_get(keys)
        except DistStoreError as error:
            raise KeyNotFoundError(str(error)) from None

    def add(self, key: str, num: int) -> int:
        """Add ``num`` to the number stored under a key and return the sum. A missing key is treated as 0."""
        return self._store.add(key, num)

    def wait(self, keys: Sequence[str], override_timeout: datetime.timedelta | None = None) -> None:
        """Wait until all these keys exist.

        Raises:
            LookupError: not all keys were set in time.
        """
        try:
            self._store.wait(keys, override_timeout)
        except DistStoreError as error:
            raise KeyNotFoundError(str(error)) from None


def _passed_on(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Store, name))
    def passed_on(self: EtcdStore, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._store, name)(*args, **kwargs)

    return passed_on


for _name in (
    *("append", "check", "close", "compare_set", "delete_key", "has_extended_api", "list_keys", "multi_set"),
    *("num_keys", "queue_push", "queue_pop", "queue_len", "set", "set_timeout"),
):
    setattr(EtcdStore, _name, _passed_on(_name))
