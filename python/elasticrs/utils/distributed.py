"""Find free ports, and create torch's store with retries."""

from __future__ import annotations

import datetime
import os
import socket
from contextlib import closing
from typing import Any

from elasticrs._engine.workers.plan import bind
from elasticrs.utils.logging import get_logger
from elasticrs.utils.store import barrier

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]

_log = get_logger(__name__)

_ADDRESS_IN_USE = "address already in use"
_SOCKET_TIMEOUT = "Socket Timeout"
_MEMBERS = "_tcp_store/num_members"


def create_c10d_store(
    is_server: bool,
    server_addr: str,
    server_port: int = -1,
    world_size: int = 1,
    timeout: float = (60 * 10),
    wait_for_workers: bool = True,
    retries: int = 3,
    use_libuv: bool | None = None,
) -> Any:
    """Create a torch ``TCPStore``. This function imports torch.

    Args:
        is_server: true if this process hosts the store.
        server_addr: host name of the server.
        server_port: port of the server; -1 for any free port.
        world_size: number of workers that connect.
        timeout: time limit in seconds for connecting, and for each operation.
        wait_for_workers: true to return only when all workers have connected.
        retries: maximum number of free ports to try, in case another process takes one first.
        use_libuv: ignored and deprecated, as in torch, which reads the variable ``USE_LIBUV`` instead.

    Raises:
        ValueError: there are several processes but no port was given.
        TimeoutError: not all workers have connected in time.
        torch.distributed.DistNetworkError: the port is taken, or the server cannot be reached.
    """
    import torch.distributed

    # Use `Any`, because type checkers consider the names in `torch.distributed` private.
    dist: Any = torch.distributed

    if use_libuv is not None:
        _log.warning("use_libuv is deprecated and ignored: set USE_LIBUV to 0 or 1")
    if server_port == -1 and world_size > 1:
        raise ValueError(
            f"server_port must be specified when world_size > 1, got server_port={server_port}, "
            f"world_size={world_size}"
        )
    attempts = retries if server_port == -1 else 1
    for attempt in range(1, attempts + 1):
        port = get_free_port() if server_port == -1 else server_port
        try:
            store = dist.TCPStore(
                host_name=server_addr,
                port=port,
                world_size=world_size,
                is_master=is_server,
                timeout=datetime.timedelta(seconds=timeout),
                wait_for_workers=wait_for_workers,
                use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
            )
            break
        except dist.DistNetworkError as error:
            if _ADDRESS_IN_USE not in str(error).lower():
                raise
            if attempt == attempts:
                text = f"on {server_addr}, port: {port} already in use"
                raise dist.DistNetworkError(text) from error
            _log.warning("port: %s already in use, attempt: [%s/%s]", port, attempt, retries)
    if wait_for_workers:
        _wait_for_all(store, world_size, timeout)
    return store


def _wait_for_all(store: Any, world_size: int, timeout: float) -> None:
    try:
        barrier(store, world_size, key_prefix=_MEMBERS, barrier_timeout=timeout)
    except RuntimeError as error:
        if str(error) != _SOCKET_TIMEOUT:
            raise
        raise TimeoutError(f"timed out waiting for all {world_size} members to join") from error


def get_free_port() -> int:
    """Return a port that is currently free on all addresses. Another process can take it at any time."""
    with closing(get_socket_with_port()) as bound:
        port: int = bound.getsockname()[1]
        return port


def get_socket_with_port() -> socket.socket:
    """Return a socket that reserves a port on all IPv6 and IPv4 addresses until closed, without listening.

    Raises:
        RuntimeError: no port is free, or file descriptors have run out.
    """
    try:
        bound = bind(0, reuses_address=False)
    except OSError as error:
        raise RuntimeError(f"Failed to create a socket: {error}") from error
    return socket.socket(fileno=bound.detach())
