"""What an event is, and its JSON, which is torch's."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]

EventMetadataValue = str | int | float | bool | None
"""What a value of an event's metadata can be."""


class EventSource(str, Enum):
    """Who tells of an event."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class _Serialized:
    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        """Its JSON, on one line."""
        return json.dumps(asdict(self))  # type: ignore[call-overload]  # its subclasses are dataclasses


@dataclass
class Event(_Serialized):
    """Something that happened in a job, as in torch.

    Args:
        name: such as ``torchelastic.worker.status.FAILED``.
        source: who tells of it.
        timestamp: milliseconds since 1970; 0 stands for the moment in which it is recorded (torch leaves the
            0).
        metadata: whatever belongs to it.
    """

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        """The event of a JSON text; an event is returned as it is.

        Raises:
            ValueError: the text is no JSON.
            KeyError: it has no source, or an unknown one.
            TypeError: it lacks a field, or has one too many.
        """
        if isinstance(data, Event):
            return data
        fields = json.loads(data)
        return Event(**{**fields, "source": EventSource[fields["source"]]})


class NodeState(str, Enum):
    """Where a node stands in a rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass
class RdzvEvent(_Serialized):
    """Something that happened in a rendezvous, as in torch.

    Args:
        name: ``file:function`` of what was going on.
        run_id: the name of the job.
        message: what happened.
        hostname: of the node.
        pid: of the agent.
        node_state: where the node stands.
        master_endpoint: of the rendezvous, when it is known.
        rank: of the node, when it is known.
        local_id: of the node in the rendezvous, when it is known.
        error_trace: of an error.
    """

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
        """The event of a JSON text; an event is returned as it is.

        Raises:
            ValueError: the text is no JSON.
            KeyError: it has no state, or an unknown one.
            TypeError: it lacks a field, or has one too many.
        """
        if isinstance(data, RdzvEvent):
            return data
        fields = json.loads(data)
        return RdzvEvent(**{**fields, "node_state": NodeState[fields["node_state"]]})
