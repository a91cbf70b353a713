"""Event classes with the same JSON format as in torch."""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import asdict, dataclass, field
from enum import Enum

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]

EventMetadataValue = str | int | float | bool | None
"""Type of a value in an event's metadata."""


class EventSource(str, Enum):
    """Source of an event."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class _Serialized:
    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        return json.dumps(asdict(self))  # type: ignore[call-overload]  # its subclasses are dataclasses


@dataclass
class Event(_Serialized):
    """An event, as in torch. ``timestamp`` is in milliseconds since 1970; 0 means the time of recording."""

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        """Parse an event from its JSON text. Return an event object unchanged.

        Raises:
            ValueError: the text is not JSON.
            KeyError: the source is missing or unknown.
            TypeError: a field is missing or unknown.
        """
        if isinstance(data, Event):
            return data
        fields = json.loads(data)
        return Event(**{**fields, "source": EventSource[fields["source"]]})


class NodeState(str, Enum):
    """State of a node in a rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass
class RdzvEvent(_Serialized):
    """Event of a rendezvous, as in torch. ``name`` is the place in the code, as ``file:function``."""

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""

    @staticmethod
    def deserialize(data: str | RdzvEvent) -> RdzvEvent:
        """Parse an event from its JSON text. See :meth:`Event.deserialize`."""
        if isinstance(data, RdzvEvent):
            return data
        fields = json.loads(data)
        return RdzvEvent(**{**fields, "node_state": NodeState[fields["node_state"]]})


PATIENCE = 1.0
"""Time limit for looking up this machine's name in the resolver, in seconds."""

_lock = threading.Lock()
_known: dict[int, str] = {}


def fq_hostname() -> str:
    """Return this machine's fully qualified host name, or the kernel's host name if the look-up is slow."""
    with _lock:
        # Look the name up again in a forked child, because it may be in another network namespace.
        pid = os.getpid()
        if pid not in _known:
            _known.clear()
            _known[pid] = _ask(PATIENCE)
        return _known[pid]


def _ask(patience: float) -> str:
    found: list[str] = []
    # Use a daemon thread, so that a hanging resolver does not keep the process alive.
    asker = threading.Thread(target=lambda: found.append(socket.getfqdn()), name="fq-hostname", daemon=True)
    asker.start()
    asker.join(patience)
    return found[0] if found else os.uname().nodename
