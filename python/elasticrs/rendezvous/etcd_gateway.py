"""Questions to etcd over plain HTTP: its gateway for JSON, and what members tell each other.

Only for what the agents' client in the core does not do: members that come and go. Without
:mod:`http.client`, whose import takes longer than all the rest of a start.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from elasticrs.rendezvous.elastic.etcd_membership import Entry, Seat
from elasticrs.rendezvous.endpoint import shown_endpoint

_OK = 200
_MOST = 1 << 20
"""Bytes of an answer."""


class GatewayError(Exception):
    """etcd has answered with an error; the text is its own."""


def members_at(seat: Seat, seconds: float) -> tuple[Entry, ...]:
    """Return the members of the cluster of a seat's member; of one without a quorum those that it is to have.

    Raises:
        GatewayError: another program answers.
        OSError: nobody does, in time.
    """
    answer = ask(seat.host, seat.peer_port, "/members", None, seconds)
    try:
        return tuple(Entry.read(each) for each in answer)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise GatewayError("another program answers") from None


def ask(host: str, port: int, path: str, body: dict[str, Any] | None, seconds: float) -> Any:
    """Ask, and return what the answer says; POST with a body.

    Args:
        host: without brackets.
        port: of a member, for clients or for members.
        path: what to ask for.
        body: for the gateway.
        seconds: for each of: to connect, to send, and each part of the answer.

    Raises:
        GatewayError: etcd refuses, or another program answers.
        OSError: no answer.
    """
    data = b"" if body is None else json.dumps(body).encode()
    # Of version 1.0, so that the answer comes whole and the connection ends with it.
    head = (
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.0\r\nHost: {shown_endpoint(host, port)}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection((host, port), seconds) as sock:
        sock.sendall(head.encode("ascii", "replace") + data)
        with sock.makefile("rb") as answered:
            status = answered.readline(_MOST).split()
            length = _MOST
            while (line := answered.readline(_MOST).strip().lower()) != b"":
                name, _, value = line.partition(b":")
                if name == b"content-length" and value.strip().isdigit():
                    length = min(_MOST, int(value))
            content = answered.read(length)
    try:
        answer = json.loads(content)
        code = int(status[1])
    except (ValueError, IndexError):
        raise GatewayError("another program answers") from None
    if code != _OK:
        why = answer.get("error") or answer.get("message") if isinstance(answer, dict) else None
        raise GatewayError(str(why or f"status {code}"))
    return answer
