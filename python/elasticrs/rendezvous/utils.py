"""Helpers for rendezvous handlers: torch's function that parses endpoints, and a periodic timer."""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

__all__ = ["parse_rendezvous_endpoint"]


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Parse ``HOST[:PORT]`` by torch's rules and with torch's error messages.

    The command line uses :func:`elasticrs.rendezvous.endpoint.parse_endpoint` instead, which is stricter.

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
    if ":" in text and not (text.startswith("[") and text.endswith("]")):
        host, _, tail = text.rpartition(":")
        if not re.fullmatch("[0-9]{1,5}", tail) or int(tail) >= 2**16:
            raise ValueError(
                f"The port number of the rendezvous endpoint '{text}' must be an integer between 0 and 65536."
            )
        port = int(tail)
    if len(host) > 1 and host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not re.match(r"^[\w\.:-]+$", host):
        raise ValueError(
            f"The hostname of the rendezvous endpoint '{text}' must be a dot-separated list of labels, an "
            "IPv4 address, or an IPv6 address."
        )
    return host, port


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


class PeriodicTimer:
    """Calls a function periodically on a separate thread. The thread stops when the timer is
    garbage-collected.

    Args:
        name: name of the thread.
        interval: time before each call.
        function: function to call.
        *args: arguments of the function.
    """

    def __init__(self, name: str, interval: timedelta, function: Callable[..., None], *args: Any) -> None:
        stop = threading.Event()
        # Do not pass the timer to the thread, because the reference would keep the timer alive.
        arguments = (interval.total_seconds(), stop, function, args)
        thread = threading.Thread(target=_repeat, name=name, args=arguments, daemon=True)
        self._finalizer = weakref.finalize(self, _stop, thread, stop)
        # Do not join the thread at interpreter exit, because joining a daemon thread at that time can block
        # forever.
        self._finalizer.atexit = False
        thread.start()

    def cancel(self) -> None:
        """Stop the thread, and wait for any call in progress."""
        self._finalizer()


def _repeat(interval: float, stop: threading.Event, function: Any, args: Any) -> None:
    while not stop.wait(interval):
        function(*args)


def _stop(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join()
