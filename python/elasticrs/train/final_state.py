"""Final state of a job, for workers that start after training has finished.

Each worker serves a copy of the state over TCP: it sends the copy to each client that has sent a secret. For
each rank, the store holds a *seat*: the address of the server, the secret, the size and digest of the copy,
and the worker's *slot*, which is the name that an agent gives to a worker and its replacements. By the slot,
a replacement finds the rank of its predecessor.

- **FINAL-1** all copies are published before the job is closed, so late workers find them.
- **FINAL-2** a downloaded copy is used only if its digest equals the digest in the store.
- **FINAL-3** the download succeeds if at least one worker that has a copy can send it.
- **FINAL-4** no two living processes have the same rank, because a process in a new slot gets a new rank.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from elasticrs._engine.inside.handover import CONNECT_TIMEOUT, Handover, Offer, take
from elasticrs._engine.job.value import Value
from elasticrs._engine.workers.node_page import VARIABLE
from elasticrs.train.coordinator import FinalState

if TYPE_CHECKING:
    from typing import Any

    from elasticrs.store import Store

_log = logging.getLogger("elasticrs.train")

PROBED_TOGETHER = 32
"""Number of workers that are contacted at the same time, because some may be dead."""

_END, _SEAT, _LATE = "end", "seat/", "late"


class LateWorker(Value):
    """Rank and final state of a process that started after training. ``world_size`` counts its rank, too."""

    rank: int
    world_size: int
    final: FinalState


def _slot() -> str | None:
    """Return the name that an agent's worker and its replacements share; ``None`` without an agent."""
    mark, local_rank = os.environ.get(VARIABLE, "").partition(":")[0], os.environ.get("LOCAL_RANK")
    return f"{mark} {local_rank}" if mark and local_rank else None


def publish(
    store: Store,
    rank: int,
    world_size: int,
    content: memoryview | None,
    near: tuple[str, int],
    *,
    in_checkpoint: bool,
) -> None:
    """Publish in ``store`` that the training has ended, and where this worker serves its copy of the final
    state (``content``), if it has one. It is served on the network interface that leads to ``near`` (host and
    port of another worker). Raise ``DistError`` or ``OSError``.
    """
    _take_seat(store, rank, content, near)
    store.set(_END, json.dumps({"world_size": world_size, "in_checkpoint": in_checkpoint}))


def join_late(store: Store, *, is_protected: bool) -> LateWorker | None:
    """Get a rank and the final state, if one was published, and serve it. Raise ``DistError`` or ``OSError``.
    ``is_protected``: the store accepts only clients that know the job's token.
    """
    if not store.check([_END]):
        return None
    end: dict[str, Any] = json.loads(store.get(_END))
    keys = [key for key in store.list_keys() if key.startswith(_SEAT)]
    seats: dict[int, dict[str, Any]] = {
        int(key.removeprefix(_SEAT)): json.loads(value)
        for key, value in zip(keys, store.multi_get(keys), strict=True)
    }
    world_size, slot = end["world_size"], _slot()
    rank = next((rank for rank, seat in seats.items() if slot and seat["slot"] == slot), None)
    if rank is None:
        rank = world_size + store.add(_LATE, 1) - 1
    world_size = max(world_size, rank + 1)
    content, near = _fetch(list(seats.values()))
    _take_seat(store, rank, None if content is None else memoryview(content), near)
    trouble = (
        "no live worker has it, and there is no final checkpoint; call set_checkpoint_manager so that the"
        " final state is saved"
    )
    return LateWorker(rank, world_size, FinalState(content, end["in_checkpoint"], trouble, is_protected))


def _take_seat(store: Store, rank: int, content: memoryview | None, near: tuple[str, int] | None) -> None:
    seat: dict[str, Any] = {"slot": _slot() or ""}
    if content is not None and near is not None:
        seat |= {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), **_serve(content, near)}
    store.set(f"{_SEAT}{rank}", json.dumps(seat))


_handovers: list[Handover] = []
"""The server from which other workers get this process's copy of the final state; empty if there is none."""


def _serve(content: memoryview, near: tuple[str, int]) -> dict[str, Any]:
    """Serve this copy of the final state, and no older one. Return the address, and the clients' secret."""

    def failed(why: str) -> None:
        _log.warning("the final state could not be sent to %s", why)

    stop_serving()
    _handovers.append(handover := Handover(lambda _: [content], near, failed))
    return {"address": list(handover.offer.address), "secret": handover.offer.secret}


def stop_serving() -> None:
    while _handovers:
        _handovers.pop().close()


def _fetch(seats: list[dict[str, Any]]) -> tuple[bytes | None, tuple[str, int] | None]:
    """Download a copy from a living worker. Return it and the worker's address, or ``None`` for both."""
    found = [seat for seat in seats if "address" in seat]
    # Replacements that start at the same time must not all download from one worker.
    random.shuffle(found)
    for begin in range(0, len(found), PROBED_TOGETHER):
        for seat in _living(found[begin : begin + PROBED_TOGETHER]):
            content = _download(seat)
            if content is not None and hashlib.sha256(content).hexdigest() == seat["sha256"]:
                return content, tuple(seat["address"])
    return None, None


def _living(seats: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def accepts(seat: dict[str, Any]) -> bool:
        try:
            socket.create_connection(seat["address"], CONNECT_TIMEOUT).close()
        except OSError:
            # Skip this worker, because most workers exit soon after training finishes.
            return False
        return True

    with ThreadPoolExecutor(len(seats), "elasticrs-probe") as pool:
        return [seat for seat, is_living in zip(seats, pool.map(accepts, seats), strict=True) if is_living]


def _download(seat: dict[str, Any]) -> bytes | None:
    """Download a worker's copy; ``None`` if the worker does not send all of it in time."""
    content = bytearray(seat["size"])
    try:
        take(Offer(tuple(seat["address"]), seat["secret"]), "", memoryview(content))
    except OSError as error:
        _log.info("no final state from %s: %s: %s", seat["address"][0], type(error).__name__, error)
        return None
    return bytes(content)
