"""Collective operations on any store like torch's ``Store``, with the same calls as in torch's agent."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from elasticrs.store import DistStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["barrier", "get_all", "store_timeout", "synchronize"]

_NUM_MEMBERS = "/num_members"
_LAST_MEMBER_CHECKIN = "/last_member"
_TRACE = "/TRACE"
_TRACING_GATE = "/TRACING_GATE"
_MAX_TRACE_MISSING_RANKS = 16

_ANYTHING = "<val_ignored>"


@contextmanager
def store_timeout(store: Any, timeout: float) -> Iterator[None]:
    """Set a store's timeout, in seconds, during a block. Restore it even after an exception, unlike torch."""
    former = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(former)


def get_all(store: Any, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """Return the values of ``<prefix>0``, ``<prefix>1`` and so on, once all keys exist.
    ``rank`` is the caller's. Rank 0 returns last, because it may host the store.
    """
    values: list[bytes] = store.multi_get([f"{prefix}{number}" for number in range(world_size)])
    all_have_read = _barrier_nonblocking(store, world_size, f"{prefix}/finished")
    if rank == 0:
        store.wait([all_have_read])
    return values


def synchronize(
    store: Any,
    data: bytes,
    rank: int,
    world_size: int,
    key_prefix: str,
    timeout: float = 300,
) -> list[bytes]:
    """Share a value with all ranks, and return the values of all ranks, ordered by rank.

    Args:
        store: store that all ranks share.
        data: value of the caller.
        rank: rank of the caller.
        world_size: number of ranks that take part.
        key_prefix: prefix of the keys. Use each prefix only once, because the values stay in the store.
        timeout: time limit in seconds.
    """
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        return get_all(store, rank, key_prefix, world_size)


def barrier(
    store: Any,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None:
    """Wait until all ranks have called this function.

    Args:
        store: store that all ranks share.
        world_size: number of ranks that take part.
        key_prefix: prefix of the keys. Use each prefix only once.
        barrier_timeout: time limit in seconds.
        rank: rank of the caller. If given, rank 0 finds the missing ranks and names them in its error.
        rank_tracing_decoder: function that returns the name of a rank for that error.
        trace_timeout: seconds to wait for the first missing rank. Rank 0 waits less for the others.

    Raises:
        AssertionError: a decoder was given without a rank.
        DistStoreError: not all ranks arrived in time. Another package's store raises its own error.
    """
    if rank is None and rank_tracing_decoder is not None:
        raise AssertionError("Tracing requires rank information")
    with store_timeout(store, barrier_timeout):
        last_member = _barrier_nonblocking(store, world_size, key_prefix)
        try:
            store.wait([last_member])
        except _store_errors() as error:
            if rank is None:
                raise
            missing = _missing_ranks(
                store, world_size, key_prefix, rank, rank_tracing_decoder or str, trace_timeout
            )
            if missing is None:
                raise
            raise type(error)(
                f"Timed out waiting on barrier on rank {rank}, for key prefix: {key_prefix} "
                f"(world_size={world_size}, missing_ranks=[{', '.join(missing)}], timeout={barrier_timeout})"
            ) from None


def _barrier_nonblocking(store: Any, world_size: int, key_prefix: str) -> str:
    """Record that this rank has arrived. Return the key that the last rank sets on arrival."""
    last_member = key_prefix + _LAST_MEMBER_CHECKIN
    if store.add(key_prefix + _NUM_MEMBERS, 1) == world_size:
        store.set(last_member, _ANYTHING)
    return last_member


def _missing_ranks(
    store: Any,
    world_size: int,
    key_prefix: str,
    rank: int,
    decoder: Callable[[int], str],
    trace_timeout: float,
) -> Iterable[str] | None:
    store.set(f"{key_prefix}{rank}{_TRACE}", _ANYTHING)
    if rank != 0:
        try:
            store.wait([f"{key_prefix}{_TRACING_GATE}"])
        except _store_errors():
            # Rank 0, which finds the missing ranks, has not arrived either.
            return None
        return [f"[<check rank 0 ({decoder(0)}) for missing rank info>]"]
    missing: list[str] = []
    for other in range(1, world_size):
        if len(missing) >= _MAX_TRACE_MISSING_RANKS:
            break
        # Wait only briefly, because all ranks have already had the full timeout to arrive.
        patience = timedelta(milliseconds=1) if missing else timedelta(seconds=trace_timeout)
        try:
            store.wait([f"{key_prefix}{other}{_TRACE}"], patience)
        except _store_errors():
            missing.append(decoder(other))
    store.set(f"{key_prefix}{_TRACING_GATE}", _ANYTHING)
    return missing


def _store_errors() -> tuple[type[Exception], ...]:
    """Return the types of exceptions that stores raise for a missing key."""
    distributed: Any = sys.modules.get("torch.distributed")
    theirs = getattr(distributed, "DistStoreError", None)
    return (DistStoreError,) if theirs is None else (DistStoreError, theirs)
