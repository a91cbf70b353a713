"""Helpers for rendezvous handlers, named as in torch: parsers for endpoints and settings, and a timer."""

from __future__ import annotations

import ipaddress
import random
import re
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

__all__ = ["parse_rendezvous_endpoint"]

_SHORTEST_DELAY = 0.01


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Parse ``HOST[:PORT]`` by torch's rules and with torch's error messages.

    The command line uses :func:`.parse_endpoint` instead, which is stricter.

    Args:
        endpoint: endpoint to parse. If it is empty or ``None``, the host is ``localhost``.
        default_port: port to return if the endpoint has no port.

    Returns:
        The host without brackets, and the port.

    Raises:
        ValueError: the endpoint has another format.
    """
    text = (endpoint or "").strip()
    if not text:
        return "localhost", default_port
    host, port = text, default_port
    if not (text.startswith("[") and text.endswith("]")):
        host, colon, tail = text.rpartition(":")
        if not colon:
            host = tail
        else:
            parsed = _try_parse_port(tail)
            if parsed is None or parsed >= 2**16:
                raise ValueError(
                    f"The port number of the rendezvous endpoint '{text}' must be an integer between 0 and "
                    "65536."
                )
            port = parsed
    if len(host) > 1 and host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not re.match(r"^[\w\.:-]+$", host):
        raise ValueError(
            f"The hostname of the rendezvous endpoint '{text}' must be a dot-separated list of labels, an "
            "IPv4 address, or an IPv6 address."
        )
    return host, port


def _parse_rendezvous_config(config_str: str) -> dict[str, str]:
    """Parse settings in the format ``KEY=VALUE,…``."""
    config: dict[str, str] = {}
    if not config_str.strip():
        return config
    for pair in config_str.split(","):
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key:
            raise ValueError(
                "The rendezvous configuration string must be in format <key1>=<value1>,...,<keyN>=<valueN>."
            )
        if not value:
            raise ValueError(f"The rendezvous configuration option '{key}' must have a value specified.")
        config[key] = value
    return config


def _try_parse_port(port_str: str) -> int | None:
    return int(port_str) if port_str and re.match(r"^[0-9]{1,5}$", port_str) else None


def _matches_machine_hostname(host: str) -> bool:
    """Return true if a host name or address belongs to this machine. Only the loopback interface, this
    machine's host name and the addresses of that name are recognized. Return false for a name that cannot be
    resolved, for which torch raises an error.
    """
    if host == "localhost":
        return True
    try:
        if ipaddress.ip_address(host).is_loopback:
            return True
    except ValueError:
        # The host is a name. Remove the trailing dot of a fully qualified name.
        host = host.rstrip(".")
    own = socket.gethostname()
    if host == own:
        return True
    addresses = {info[4][0] for info in _resolved(host)}
    return any(info[3] == host or info[4][0] in {host, *addresses} for info in _resolved(own))


def _resolved(host: str) -> list[Any]:
    try:
        return socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP, flags=socket.AI_CANONNAME)
    except (ValueError, OSError):
        return []


def _delay(seconds: float | tuple[float, float]) -> None:
    """Sleep for a number of seconds, or for a random time between two bounds. Skip the sleep if it is shorter
    than 10 ms.
    """
    if isinstance(seconds, tuple):
        seconds = random.uniform(*seconds)
    if seconds >= _SHORTEST_DELAY:
        time.sleep(seconds)


class _PeriodicTimer:
    """Calls a function periodically on a separate thread. The thread stops when the timer is
    garbage-collected.

    Args:
        interval: time before each call.
        function: function to call.
        *args: positional arguments of the function.
        **kwargs: keyword arguments of the function.
    """

    def __init__(self, interval: timedelta, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._name: str | None = None
        self._interval = interval.total_seconds()
        self._call = (function, args, kwargs)
        self._finalizer: weakref.finalize[Any, Any] | None = None

    @property
    def name(self) -> str | None:
        return self._name

    def set_name(self, name: str) -> None:
        """Set the name of the thread.

        Raises:
            RuntimeError: the timer has already started.
        """
        if self._finalizer is not None:
            raise RuntimeError("The timer has already started.")
        self._name = name

    def start(self) -> None:
        """Start the thread. It calls the function for the first time after one interval.

        Raises:
            RuntimeError: the timer has already started.
        """
        if self._finalizer is not None:
            raise RuntimeError("The timer has already started.")
        stop = threading.Event()
        # Do not pass the timer to the thread, because the reference would keep the timer alive.
        arguments, name = (self._interval, stop, *self._call), self._name or "PeriodicTimer"
        thread = threading.Thread(target=_repeat, name=name, args=arguments, daemon=True)
        self._finalizer = weakref.finalize(self, _stop, thread, stop)
        # Do not join the thread at interpreter exit, because joining a daemon thread at that time can block
        # forever.
        self._finalizer.atexit = False
        thread.start()

    def cancel(self) -> None:
        if self._finalizer is not None:
            self._finalizer()


def _repeat(interval: float, stop: threading.Event, function: Any, args: Any, kwargs: Any) -> None:
    while not stop.wait(interval):
        function(*args, **kwargs)


def _stop(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join()
