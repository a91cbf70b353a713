"""A prefix for the keys of any store."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_OF_A_KEY = frozenset((
    *("set", "get", "add", "append", "compare_set", "delete_key", "barrier"),
    *("queue_push", "queue_pop", "queue_len"),
))  # fmt: skip
_OF_KEYS = frozenset(("multi_set", "multi_get", "wait", "check"))


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
    """Puts a prefix before every key; what has no keys, such as ``timeout``, is the store's.

    Args:
        prefix: with a slash after it.
        store: anything with the methods of torch's ``Store`` that are called.
    """

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix = f"{prefix}/"
        self.underlying_store = store

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self.underlying_store, name)
        if name in _OF_A_KEY:
            return lambda key, *rest, **named: found(self._prefix + key, *rest, **named)
        if name in _OF_KEYS:
            return lambda keys, *rest, **named: found(self._with(keys), *rest, **named)
        return found

    def _with(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]
