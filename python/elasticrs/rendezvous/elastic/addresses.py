"""Pure functions that compare and classify host names and numeric addresses given as text."""

from __future__ import annotations

import _socket

TYPE_CHECKING = False


def plain(name: str) -> str:
    """Return a host name in the form that is used for comparisons: lower case, without a trailing dot."""
    return name.rstrip(".").lower()


def packed(address: str) -> bytes | None:
    """Return the bytes of a numeric address; ``None`` for a name. An IPv4 address that is mapped to IPv6
    (``::ffff:a.b.c.d``) is returned as IPv4.
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
    """Return true if a numeric address stands for all interfaces (``0.0.0.0`` or ``::``)."""
    data = packed(address)
    return data is not None and not any(data)


def is_usable_elsewhere(address: str) -> bool:
    """Return true if other machines may be able to reach the node at this numeric address. They cannot use a
    loopback, link-local or unspecified address.
    """
    data = packed(address)
    if data is None or not any(data) or is_loopback(address):
        return False
    return data[:2] != b"\xa9\xfe" if len(data) == 4 else (data[0], data[1] & 0xC0) != (0xFE, 0x80)
