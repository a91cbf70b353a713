"""Pure functions that compare and classify host names and numeric addresses."""

from __future__ import annotations

import _socket

TYPE_CHECKING = False


def plain(name: str) -> str:
    """Return a host name in normalized form for comparisons: lower case, without a trailing dot."""
    return name.rstrip(".").lower()


def packed(address: str) -> bytes | None:
    """Return the bytes of a numeric address; ``None`` for a name. Convert IPv4-mapped IPv6 addresses
    (``::ffff:a.b.c.d``) to IPv4.
    """
    text = address.partition("%")[0]
    for family in (_socket.AF_INET, _socket.AF_INET6):
        try:
            data = _socket.inet_pton(family, text)
        except (OSError, ValueError):
            continue
        return data[12:] if data[:12] == bytes(10) + b"\xff\xff" and len(data) == 16 else data
    return None


def is_loopback(address: str) -> bool:
    """Return true if a numeric address is in 127.0.0.0/8, or is ::1."""
    data = packed(address)
    return data is not None and (data[0] == 127 if len(data) == 4 else data == bytes(15) + b"\x01")


def is_loopback_name(host: str) -> bool:
    """Return true if the host of an endpoint is ``localhost`` or a loopback address."""
    bare = host.strip("[]")
    return plain(bare) == "localhost" or is_loopback(bare)


def is_unspecified(address: str) -> bool:
    """Return true if a numeric address is the wildcard address (``0.0.0.0`` or ``::``)."""
    data = packed(address)
    return data is not None and not any(data)


def is_usable_elsewhere(address: str) -> bool:
    """Return true if other machines may be able to connect to this numeric address. Loopback, link-local and
    unspecified addresses are unusable for them.
    """
    data = packed(address)
    if data is None or not any(data) or is_loopback(address):
        return False
    return data[:2] != b"\xa9\xfe" if len(data) == 4 else (data[0], data[1] & 0xC0) != (0xFE, 0x80)
