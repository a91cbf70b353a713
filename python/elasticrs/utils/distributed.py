"""Ports, and torch's store made with retries."""

from __future__ import annotations

import datetime
import os
import socket
from contextlib import closing
from typing import Any

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
    """Make torch's ``TCPStore``; imports torch.

    Args:
        is_server: whether this process serves it.
        server_addr: host of the server.
        server_port: its port; -1: any free one, and another one when that has been taken meanwhile.
        world_size: how many connect.
        timeout: seconds for connecting, and for every operation.
        wait_for_workers: return when all have connected.
        retries: how often a free port is tried.
        use_libuv: deprecated, as in torch: the variable ``USE_LIBUV`` decides.

    Raises:
        ValueError: several processes, but no port.
        TimeoutError: not all have connected in time.
        torch.distributed.DistNetworkError: the port is taken, or the server cannot be reached.
    """
    import torch.distributed

    # Its names are not exported in the sense of type checkers.
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
    """A port that was free on all addresses a moment ago; anybody may take it meanwhile."""
    with closing(get_socket_with_port()) as bound:
        port: int = bound.getsockname()[1]
        return port


def get_socket_with_port() -> socket.socket:
    """A socket that keeps a free port on all addresses, IPv6 and IPv4, until it is closed. It does not
    listen.

    Raises:
        RuntimeError: no port is free, or no descriptor.
    """
    trouble: OSError | None = None
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            bound = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            trouble = error
            continue
        try:
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            bound.bind((host, 0))
        except OSError as error:
            # IPv6 may be compiled in, but switched off.
            bound.close()
            trouble = error
        else:
            return bound
    raise RuntimeError(f"Failed to create a socket: {trouble}")
