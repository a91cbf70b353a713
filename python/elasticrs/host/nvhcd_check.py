"""Ask the health check daemon of a site, which serves NVIDIA's ``nvhcd.proto`` on a Unix socket.

The messages are encoded here, because they have four fields, and generated code would need a fixed release of
protobuf.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elasticrs.host.health_program import NoAnswerError, say

if TYPE_CHECKING:
    from collections.abc import Iterator

METHOD = "/nvhcd.HealthCheckService/RunHealthCheck"
NO_ARGUMENTS = b""
"""Encoded request without arguments for the daemon's script."""
_SUCCESS, _EXIT_CODE, _OUTPUT, _ERROR = 1, 2, 3, 4


def main(path: str) -> int:
    """Let the daemon run its check. Print the result, and return 0 if the node is fit, otherwise 1.

    Args:
        path: path of the daemon's socket.

    Raises:
        NoAnswerError: the daemon does not answer, could not run its check, or answers something else.
    """
    # Keep grpc's own log out of the output, whose last line is the reason.
    os.environ["GRPC_VERBOSITY"] = "NONE"
    import grpc

    with grpc.insecure_channel(f"unix:{path}") as channel:
        try:
            reply = channel.unary_unary(METHOD)(NO_ARGUMENTS)
        except grpc.RpcError as error:
            raise NoAnswerError(f"{path} does not answer: {error.code().name}: {error.details()}") from None
    return report(reply)


def report(reply: bytes) -> int:
    """Print the result in the daemon's reply, and return the exit code.

    Raises:
        NoAnswerError: the reply has no result.
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
    # Negative numbers are encoded as 64 bits.
    code = code - (1 << 64) if code >= 1 << 63 else code
    say(f"the check exited with code {code}{': ' if text else ''}{' '.join(text.split())}")
    return 1


def decode(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a protobuf message. The value is a number or bytes.

    Raises:
        ValueError: the bytes are not a message.
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
            raise ValueError(f"wire type {kind}")
        if not number or size > len(message) - position:
            raise ValueError("the message ends early")
        yield number, message[position : position + size]
        position += size


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Decode a number of variable length. Return it, and the position after it."""
    value = 0
    for index, byte in enumerate(message[position : position + 10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    raise ValueError("the number does not end")
