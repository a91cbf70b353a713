"""Wrapper that adds a prefix to the keys of any store."""

from __future__ import annotations

import sys
from typing import Any

_OF_A_KEY = frozenset((
    *("set", "get", "add", "append", "compare_set", "delete_key", "barrier"),
    *("queue_push", "queue_pop", "queue_len"),
))  # fmt: skip
_OF_KEYS = frozenset(("multi_set", "multi_get", "wait", "check"))


def with_prefix(store: Any, prefix: str) -> Any:
    """Return a store that prepends a prefix and a slash to every key, like torch's ``PrefixStore``."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(store, distributed.Store):
        # Use torch's class for a torch store, because torch's functions accept no other class.
        return distributed.PrefixStore(prefix, store)
    return PrefixStore(prefix, store)


class PrefixStore:
    """Store that prepends a prefix and a slash to every key. Attributes that involve no key, such as
    ``timeout``, come from the underlying store.
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
            return lambda keys, *rest, **named: found([self._prefix + key for key in keys], *rest, **named)
        return found
