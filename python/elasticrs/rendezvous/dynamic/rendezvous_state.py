"""Shared state of the nodes of a rendezvous, and its encoding.

The state is encoded as JSON with a version number, and its size is limited. A process that can write to the
back end may disturb the rendezvous but cannot run code on the nodes. The state contains no timestamps,
because the clocks of hosts differ. Instead, heartbeats and last calls are numbered, and each node measures
elapsed time on its own clock.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from elasticrs.rendezvous.api import RendezvousStateError
from elasticrs.rendezvous.elastic.seating import natural
from elasticrs.rendezvous.elastic.validation import ANY, COUNT, FLAG, INT, TEXT, fields, one_of, row

VERSION = 1
MAX_BYTES = 4 << 20
"""Maximum size of an encoded state, in bytes. Each node adds about 60 bytes."""

_FORMAT = "elasticrs.rendezvous"


class Node(NamedTuple):
    """Identity of a node. Each handler represents a separate node, so a process with several handlers has
    several nodes. ``local_id`` is the handler's number within its process.
    """

    addr: str
    pid: int
    local_id: int

    def __str__(self) -> str:
        return f"{self.addr}_{self.pid}_{self.local_id}"


class Place(Enum):
    """Role of a node in a rendezvous round."""

    PARTICIPANT = "participant"
    WAITING = "waiting"
    REDUNDANT = "redundant"


@dataclass(frozen=True)
class Standing:
    """State of one node in the rendezvous.

    Args:
        place: role of the node in the round.
        beat: number of the node's last heartbeat. A node never uses the same number twice.
        rank: rank of a participant in a complete round; -1 for other nodes.
    """

    place: Place
    beat: int
    rank: int = -1


@dataclass(frozen=True)
class State:
    """Immutable state that the nodes of a rendezvous share.

    Args:
        round: number of the round.
        size: number of nodes in the complete round; 0 while the round is forming.
        last_call: number of the current last call. ``None`` unless the round is forming and the minimum
            number of nodes has joined.
        last_calls: number of last calls that have started so far.
        closed: reason why the rendezvous is closed; ``None`` while it is open.
        nodes: all nodes that take part in the round or wait.
        has_failed: true if the rendezvous was closed because the job has failed. Workers that are still
            running then have to stop.
    """

    round: int = 0
    size: int = 0
    last_call: int | None = None
    last_calls: int = 0
    closed: str | None = None
    nodes: dict[Node, Standing] = field(default_factory=dict)
    has_failed: bool = False

    @property
    def is_complete(self) -> bool:
        """True if the round is complete, which means that its nodes have ranks."""
        return self.size > 0

    @property
    def is_intact(self) -> bool:
        """True if the round is complete and no participant has left it."""
        return self.is_complete and len(self.at(Place.PARTICIPANT)) == self.size

    def at(self, place: Place) -> list[Node]:
        """Return the nodes with this role."""
        return [node for node, standing in self.nodes.items() if standing.place is place]

    def place_of(self, node: Node) -> Place | None:
        """Return a node's role in the round; ``None`` if the state does not contain the node."""
        standing = self.nodes.get(node)
        return None if standing is None else standing.place

    def with_node(self, node: Node, standing: Standing) -> State:
        """Return a copy of the state with a new role, heartbeat and rank for ``node``."""
        return replace(self, nodes={**self.nodes, node: standing})


_FIELDS = {
    **dict.fromkeys(("round", "size", "last_call", "last_calls"), COUNT),
    **dict.fromkeys(("format", "version"), ANY),
    "closed": TEXT,
    "has_failed": FLAG,
    "nodes": lambda value: isinstance(value, list),
}
_NODE = (TEXT, COUNT, COUNT, one_of(*(place.value for place in Place)), COUNT, INT)


def natural_order(node: Node) -> tuple[object, int, int]:
    """Return the sort key that determines the order of ranks: first by host name (``node2`` before
    ``node10``), then by process.
    """
    return natural(node.addr), node.pid, node.local_id


def encode(state: State) -> bytes:
    """Encode a state.

    Raises:
        RendezvousStateError: the state is too large.
    """
    nodes = [[*node, each.place.value, each.beat, each.rank] for node, each in state.nodes.items()]
    document = {"format": _FORMAT, "version": VERSION, **vars(state), "nodes": nodes}
    data = json.dumps(document, separators=(",", ":")).encode()
    if len(data) > MAX_BYTES:
        raise RendezvousStateError(f"the state of {len(nodes)} nodes is larger than {MAX_BYTES} bytes")
    return data


def decode(data: bytes) -> State:
    """Decode a state.

    Raises:
        RendezvousStateError: the state was not written by elasticrs, has another version, or is damaged.
    """
    if len(data) > MAX_BYTES:
        raise RendezvousStateError(f"the state of the rendezvous has {len(data)} bytes, at most {MAX_BYTES}")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise RendezvousStateError(
            "the state of the rendezvous was not written by elasticrs (torch writes pickled ones, which are "
            "never loaded here): use another run id, or elasticrs on all nodes"
        )
    if document.get("version") != VERSION:
        raise RendezvousStateError(
            f"the state of the rendezvous has version {document.get('version')!r}, here it is {VERSION}: "
            "use the same release of elasticrs on all nodes"
        )
    try:
        return _state(document)
    except (KeyError, TypeError, ValueError) as error:
        raise RendezvousStateError(f"the state of the rendezvous is damaged: {error!r}") from error


def _state(document: dict[str, Any]) -> State:
    found = fields(document, _FIELDS, ("round", "size", "last_calls", "has_failed", "nodes"))
    nodes: dict[Node, Standing] = {}
    for each in found.pop("nodes"):
        addr, pid, local_id, place, beat, rank = row(each, _NODE)
        nodes[Node(addr, pid, local_id)] = Standing(Place(place), beat, rank)
    del found["format"], found["version"]
    return State(**found, nodes=nodes)
