"""Addresses as text, and which one workers use to reach the worker store of a round; pure."""

from __future__ import annotations

import _socket

TYPE_CHECKING = False


def plain(name: str) -> str:
    """A host's name as it is compared."""
    return name.rstrip(".").lower()


def packed(address: str) -> bytes | None:
    """The bytes of a numeric address, IPv4 ones that are written as IPv6 as IPv4; ``None`` for a name."""
    text = address.partition("%")[0]
    for family in (_socket.AF_INET, _socket.AF_INET6):
        try:
            data = _socket.inet_pton(family, text)
        except (OSError, ValueError):
            continue
        return data[12:] if data[:12] == bytes(10) + b"\xff\xff" and len(data) == 16 else data
    return None


def is_loopback(address: str) -> bool:
    """True if a numeric address is 127.0.0.0/8 or ::1."""
    data = packed(address)
    return data is not None and (data[0] == 127 if len(data) == 4 else data == bytes(15) + b"\x01")


def is_loopback_name(host: str) -> bool:
    """True if a host of an endpoint is ``localhost``, or a loopback address."""
    bare = host.strip("[]")
    return plain(bare) == "localhost" or is_loopback(bare)


def is_unspecified(address: str) -> bool:
    """True if a numeric address stands for all interfaces."""
    data = packed(address)
    return data is not None and not any(data)


def is_usable_elsewhere(address: str) -> bool:
    """True if a numeric address may mean this node on other machines too: no loopback, no link-local one."""
    data = packed(address)
    if data is None or not any(data) or is_loopback(address):
        return False
    return data[:2] != b"\xa9\xfe" if len(data) == 4 else (data[0], data[1] & 0xC0) != (0xFE, 0x80)
