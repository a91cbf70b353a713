"""Ports for tests that need to know one before anything listens on it."""

import random
import socket


def free() -> int:
    """Below the ephemeral ports, of which any could be taken a moment later."""
    # Not the numbers that hypothesis seeds: all processes that run tests would begin with the same port.
    numbers = random.SystemRandom()
    while True:
        port = numbers.randrange(10000, 32000)
        if is_free(port):
            return port


def pairs(count: int) -> list[int]:
    """So many ports in order, each free as the next one is; no two overlap."""
    found = set[int]()
    while len(found) < count:
        port = free() & ~1
        if is_free(port) and is_free(port + 1):
            found.add(port)
    return sorted(found)


def is_free(port: int) -> bool:
    """True if nobody listens there."""
    with socket.socket(socket.AF_INET6) as sock:
        return sock.connect_ex(("::ffff:127.0.0.1", port)) != 0
