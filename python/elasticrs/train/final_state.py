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
import hmac
import ipaddress
import json
import logging
import os
import random
import secrets
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import TYPE_CHECKING

from elasticrs._engine.job.value import Value
from elasticrs._engine.workers.node_page import VARIABLE
from elasticrs.train.coordinator import FinalState

if TYPE_CHECKING:
    from typing import Any

    from elasticrs.store import Store

_log = logging.getLogger("elasticrs.train")

CONNECT_TIMEOUT = 3.0
"""Timeout for connecting to one worker, in seconds. A node that is down does not refuse connections."""

PROBED_TOGETHER = 32
"""Number of workers that are contacted at the same time, because some may be dead."""

TRANSFER_TIMEOUT = 30.0
"""Timeout in seconds for a transfer that receives no data."""

MIN_RATE = 1 << 20
"""Minimum rate in bytes per second. A transfer's time limit is size / rate + :data:`TRANSFER_TIMEOUT`."""

_BLOCK = 1 << 20
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


class _Server(ThreadingTCPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 -- signature of the base class
        """Log one line. The base class would write a traceback to the worker's stderr."""
        error = sys.exc_info()[1]
        _log.warning(
            "the final state could not be sent to %s: %s: %s", client_address[0], type(error).__name__, error
        )


class _Server6(_Server):
    address_family = socket.AF_INET6


_servers: list[_Server] = []
"""The server of this process's copy of the final state, if any."""


def _serve(content: memoryview, near: tuple[str, int]) -> dict[str, Any]:
    """Serve this copy of the final state, and no older one. Return the address, and the clients' secret."""
    secret = secrets.token_urlsafe(32)

    class Handler(StreamRequestHandler):
        timeout = TRANSFER_TIMEOUT

        def handle(self) -> None:
            received = self.rfile.readline(len(secret) + 1).rstrip()
            if hmac.compare_digest(received, secret.encode()):
                self.wfile.write(content)

    stop_serving()
    family, local = _address_towards(near)
    host, shown = serving_address(near[0], local)
    server = (_Server6 if family == socket.AF_INET6 else _Server)((host, 0), Handler)
    _servers.append(server)
    threading.Thread(target=server.serve_forever, name="elasticrs-final-state", daemon=True).start()
    return {"address": [shown, server.server_address[1]], "secret": secret}


def stop_serving() -> None:
    while _servers:
        server = _servers.pop()
        server.shutdown()
        server.server_close()


def serving_address(near: str, local: str) -> tuple[str, str]:
    """Return the address to listen on, and the address to publish. ``local`` is this machine's address on the
    route to another worker, ``near``. If it is a loopback address, it is useless to other machines. If
    ``near`` is a name, it is then this machine's name, so publish that.
    """
    if ipaddress.ip_address(local).is_loopback and near != "localhost":
        with suppress(ValueError):
            ipaddress.ip_address(near)
            return local, local
        return "::" if ":" in local else "", near
    return local, local


def _address_towards(near: tuple[str, int]) -> tuple[int, str]:
    family, *_, address = socket.getaddrinfo(*near, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return family, probe.getsockname()[0]


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
    content = bytearray()
    # Limit the whole download, because the socket's own timeout restarts with each received byte.
    deadline = time.monotonic() + TRANSFER_TIMEOUT + seat["size"] / MIN_RATE
    try:
        with socket.create_connection(seat["address"], CONNECT_TIMEOUT) as connection:
            connection.sendall(f"{seat['secret']}\n".encode())
            while (missing := seat["size"] - len(content)) > 0:
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError("the transfer was too slow")
                connection.settimeout(min(TRANSFER_TIMEOUT, left))
                received = connection.recv(min(missing, _BLOCK))
                if not received:
                    raise ConnectionError("the connection ended too early")
                content += received
    except OSError as error:
        _log.info("no final state from %s: %s: %s", seat["address"][0], type(error).__name__, error)
        return None
    return bytes(content)


def _after_fork_in_child() -> None:
    # Close the server in a forked child. Otherwise, the child would keep the port open, but not answer.
    while _servers:
        _servers.pop().server_close()


os.register_at_fork(after_in_child=_after_fork_in_child)
