"""Ports for tests that need to know one before anything listens on it."""

import random
import socket


def free() -> int:
    """Below the ephemeral ports, of which any could be taken a moment later."""
    # Not the numbers that hypothesis seeds: all processes that run tests would begin with the same port.
    numbers = random.SystemRandom()
    while True:
        port = numbers.randrange(10000, 32000)
        with socket.socket(socket.AF_INET6) as sock:
            if sock.connect_ex(("::ffff:127.0.0.1", port)) != 0:
                return port
