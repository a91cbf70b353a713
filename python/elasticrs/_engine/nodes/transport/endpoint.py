"""Parse endpoints given by users, and format endpoints for messages."""

from __future__ import annotations

from elasticrs._engine.job.config import UsageError

EXPECTED = "HOST[:PORT]"


def parse_endpoint(name: str, endpoint: str) -> tuple[str, int | None]:
    """Parse ``HOST[:PORT]``, where an IPv6 address must be in brackets. Return the host without brackets, and
    the port or ``None``.

    Raises:
        UsageError: the endpoint has another format. The message contains ``name``, the name of the option.
    """
    expected = EXPECTED
    if endpoint.startswith("["):
        host, bracket, tail = endpoint[1:].partition("]")
        valid = bool(bracket) and _is_ipv6(host) and (not tail or tail.startswith(":"))
        port = tail[1:] if tail else None
    else:
        host, colon, tail = endpoint.partition(":")
        port = tail if colon else None
        valid = bool(host) and not any(character.isspace() or character in ",/=[]" for character in host)
        address, _, last = endpoint.rpartition(":")
        if _is_ipv6(endpoint):
            expected = f"{EXPECTED}, an IPv6 address in brackets: [{endpoint}]"
        elif _is_ipv6(address) and _is_port(last):
            expected = f"{EXPECTED}, an IPv6 address in brackets: [{address}]:{last}"
    if not valid or not (port is None or _is_port(port)):
        raise UsageError(f"{name}: got {endpoint!r}, expected {expected}")
    return host, None if port is None else int(port)


def shown_endpoint(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < 2**16


def _is_ipv6(text: str) -> bool:
    import _socket

    try:
        _socket.inet_pton(_socket.AF_INET6, text.partition("%")[0])
    except (OSError, ValueError):
        return False
    return True
