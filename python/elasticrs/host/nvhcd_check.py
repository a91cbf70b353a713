"""Query a site's health check daemon, a service that implements NVIDIA's ``nvhcd.proto`` on a Unix socket.

This module decodes the daemon's reply without protobuf. The reply has only four fields, and generated code
would require a particular release of protobuf.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elasticrs.host.health_program import NoAnswerError, say

if TYPE_CHECKING:
    from collections.abc import Iterator

METHOD = "/nvhcd.HealthCheckService/RunHealthCheck"
NO_ARGUMENTS = b""
"""Encoded request that passes no arguments to the daemon's script."""
_SUCCESS, _EXIT_CODE, _OUTPUT, _ERROR = 1, 2, 3, 4


def main(path: str) -> int:
    """Have the daemon run its check. Return 0 if the node is fit; otherwise print the reason and return 1.

    Args:
        path: path of the daemon's socket.

    Raises:
        NoAnswerError: the daemon does not reply, could not run its check, or sends a malformed reply.
    """
    # Silence grpc's logging, because the caller reads the reason from the last line of this program's output.
    os.environ["GRPC_VERBOSITY"] = "NONE"
    import grpc

    with grpc.insecure_channel(f"unix:{path}") as channel:
        try:
            reply = channel.unary_unary(METHOD)(NO_ARGUMENTS)
        except grpc.RpcError as error:
            raise NoAnswerError(f"{path} does not answer: {error.code().name}: {error.details()}") from None
    return report(reply)


def report(reply: bytes) -> int:
    """Evaluate the daemon's reply. Return 0 if the node is fit; otherwise print the reason and return 1.

    Raises:
        NoAnswerError: the reply is malformed, or says that the check could not be run.
    """
    numbers: dict[int, int] = {}
    texts: dict[int, str] = {}
    try:
        for number, value in decode(reply):
            if isinstance(value, int):
                numbers[number] = value
            else:
                texts[number] = value.decode("utf-8", "replace")
    except ValueError:
        raise NoAnswerError("the reply is not a HealthCheckResponse") from None
    code, text = numbers.get(_EXIT_CODE, 0), texts.get(_ERROR) or texts.get(_OUTPUT, "")
    if numbers.get(_SUCCESS):
        return 0
    if not code:
        raise NoAnswerError(
            f"the check could not be run: {text}" if text else "the reply is not a HealthCheckResponse"
        )
    # Protobuf encodes a negative number as an unsigned 64-bit number (two's complement).
    code = code - (1 << 64) if code >= 1 << 63 else code
    say(f"the check exited with code {code}{': ' if text else ''}{' '.join(text.split())}")
    return 1


def decode(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field in a protobuf message. The value is an integer for varint
    fields, and bytes for all others.

    Raises:
        ValueError: the bytes are not a protobuf message.
    """
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, position = _varint(message, position)
            yield number, value
            continue
        if kind == 2:
            size, position = _varint(message, position)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"unknown wire type {kind}")
        if not number or size > len(message) - position:
            raise ValueError("invalid or truncated field")
        yield number, message[position : position + size]
        position += size


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Decode a varint. Return its value and the position of the next byte after it."""
    value = 0
    for index, byte in enumerate(message[position : position + 10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    raise ValueError("unterminated varint")
