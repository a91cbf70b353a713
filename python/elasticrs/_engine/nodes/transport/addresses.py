"""Pure functions for host names, numeric addresses, and the endpoints that users give."""

from __future__ import annotations

import _socket

from elasticrs._engine.job.config import UsageError


def plain(name: str) -> str:
    """Normalize a host name for comparisons."""
    return name.rstrip(".").lower()


def packed(address: str) -> bytes | None:
    """Return the bytes of a numeric address; ``None`` for a name. IPv4-mapped addresses become IPv4."""
    text = address.partition("%")[0]
    for family in (_socket.AF_INET, _socket.AF_INET6):
        try:
            data = _socket.inet_pton(family, text)
        except (OSError, ValueError):
            continue
        return data[12:] if data[:12] == bytes(10) + b"\xff\xff" and len(data) == 16 else data
    return None


def is_loopback(address: str) -> bool:
    data = packed(address)
    return data is not None and (data[0] == 127 if len(data) == 4 else data == bytes(15) + b"\x01")


def is_loopback_name(host: str) -> bool:
    bare = host.strip("[]")
    return plain(bare) == "localhost" or is_loopback(bare)


def is_unspecified(address: str) -> bool:
    """Return true if a numeric address is the wildcard address (``0.0.0.0`` or ``::``)."""
    data = packed(address)
    return data is not None and not any(data)


def is_usable_elsewhere(address: str) -> bool:
    """Return true unless a numeric address is loopback, link-local or unspecified."""
    data = packed(address)
    if data is None or not any(data) or is_loopback(address):
        return False
    return data[:2] != b"\xa9\xfe" if len(data) == 4 else (data[0], data[1] & 0xC0) != (0xFE, 0x80)


EXPECTED = "HOST[:PORT]"


def parse_endpoint(name: str, endpoint: str) -> tuple[str, int | None]:
    """Parse ``HOST[:PORT]``, with IPv6 in brackets. Raise :class:`.UsageError` about the option ``name``."""
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
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < 2**16


def _is_ipv6(text: str) -> bool:
    return ":" in text and packed(text) is not None
