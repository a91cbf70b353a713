"""Sends an ICMP echo request to the address in the first argument, and exits with 0 if the reply arrives.

The second argument is the number of seconds to wait. Wants a raw socket.
"""

import os
import select
import socket
import struct
import sys
import time

ECHO = {socket.AF_INET: (8, 0), socket.AF_INET6: (128, 129)}
"""Type of the request, type of the answer."""


def checksum(message: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(message) // 2}H", message))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def main(address: str, seconds: float) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    protocol = socket.IPPROTO_ICMPV6 if family == socket.AF_INET6 else socket.IPPROTO_ICMP
    request, answer = ECHO[family]
    me = os.getpid() & 0xFFFF
    message = struct.pack("!BBHHH", request, 0, 0, me, 1)
    if family == socket.AF_INET:  # for IPv6, the kernel computes the checksum
        message = struct.pack("!BBHHH", request, 0, checksum(message), me, 1)
    deadline = time.monotonic() + seconds
    with socket.socket(family, socket.SOCK_RAW, protocol) as raw:
        raw.connect((address, 0))
        try:
            raw.send(message)
        except OSError as error:
            print(error, file=sys.stderr)
            return 1
        while select.select([raw], [], [], max(0.0, deadline - time.monotonic()))[0]:
            received = raw.recv(1 << 12)
            icmp = received if family == socket.AF_INET6 else received[(received[0] & 15) * 4 :]
            kind, _, _, whose, _ = struct.unpack("!BBHHH", icmp[:8])
            if (kind, whose) == (answer, me):
                return 0
    print(f"no answer from {address} within {seconds} s", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
