"""Which address workers use to reach the worker store of a round: a pure function of the registrations."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticrs.rendezvous.elastic.records import Node


def is_loopback(address: str) -> bool:
    """Whether an address or name means the host that uses it."""
    bare = address.strip("[]").lower().rstrip(".")
    return bare.startswith(("127.", "::ffff:127.")) or bare in ("::1", "localhost", "0:0:0:0:0:0:0:1")


def master_addr(nodes: Sequence[Node]) -> str:
    """The address of group rank 0 that all members can use.

    The user's choice for that node, else its own end of the connection to the store, which the store's host
    has seen to work. A loopback address only serves a round on one host.

    Args:
        nodes: the members, by group rank; not empty.
    """
    first = nodes[0]
    if first.local_addr:
        return first.local_addr
    if not is_loopback(first.address):
        return first.address
    if any(node.host != first.host for node in nodes) and first.fallback_addr:
        return first.fallback_addr
    return first.address
