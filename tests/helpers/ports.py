"""Port numbers for tests that need to know a port before anything listens on it."""

import random
import socket


def free() -> int:
    """Return a free port below the ephemeral ports, because any of those could be taken a moment later."""
    # Do not use the generator that hypothesis seeds, because all test processes would start with the same
    # port.
    numbers = random.SystemRandom()
    while True:
        port = numbers.randrange(10000, 32000)
        if is_free(port):
            return port


def pairs(count: int) -> list[int]:
    """Return ``count`` free ports in ascending order. The port after each of them is also free, and no two
    pairs overlap.
    """
    found = set[int]()
    while len(found) < count:
        port = free() & ~1
        if is_free(port) and is_free(port + 1):
            found.add(port)
    return sorted(found)


def is_free(port: int) -> bool:
    """Return true if nothing listens on this port."""
    with socket.socket(socket.AF_INET6) as sock:
        return sock.connect_ex(("::ffff:127.0.0.1", port)) != 0
