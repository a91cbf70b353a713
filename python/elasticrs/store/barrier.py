"""A barrier over any store."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datetime
    from typing import Any


def meet(store: Any, key: str, world_size: int, timeout: datetime.timedelta | None) -> None:
    """Wait until a number of callers have called this with the same key, which may be used again when all
    have passed. ``timeout``: that of the store when ``None``.

    Raises:
        DistStoreError: not all came in time.
    """
    from elasticrs.store import DistStoreError

    come = store.add(f"{key}/come", 1)
    passed = f"{key}/passed/{(come - 1) // world_size}"
    if come % world_size == 0:
        store.set(passed, b"")
    span = store.timeout if timeout is None else timeout
    try:
        store.wait([passed], span)
    except DistStoreError:
        milliseconds = round(span.total_seconds() * 1000)
        raise DistStoreError(f"barrier timeout after {milliseconds}ms, key: {key}") from None
