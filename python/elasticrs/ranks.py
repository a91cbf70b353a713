"""Who gets which rank: pure, the same on every node, as in torch.

Global ranks follow the order of group ranks; role ranks follow it among the nodes of the same role.
"""

from __future__ import annotations

from elasticrs._value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class NodeShare(Value):
    """What one node brings into a round.

    Args:
        role: the role of its workers.
        local_world_size: how many workers it runs.
    """

    __slots__ = ("local_world_size", "role")

    def __init__(self, role: str, local_world_size: int) -> None:
        self.role = role
        self.local_world_size = local_world_size


class WorkerRanks(Value):
    """The ranks of one worker."""

    __slots__ = (
        "global_rank",
        "group_rank",
        "group_world_size",
        "local_rank",
        "local_world_size",
        "role",
        "role_rank",
        "role_world_size",
        "world_size",
    )

    def __init__(
        self,
        role: str,
        local_rank: int,
        global_rank: int,
        group_rank: int,
        role_rank: int,
        local_world_size: int,
        world_size: int,
        group_world_size: int,
        role_world_size: int,
    ) -> None:
        self.role = role
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.group_rank = group_rank
        self.role_rank = role_rank
        self.local_world_size = local_world_size
        self.world_size = world_size
        self.group_world_size = group_world_size
        self.role_world_size = role_world_size


def assign(nodes: Sequence[NodeShare], group_rank: int) -> list[WorkerRanks]:
    """The ranks of the workers of one node.

    Args:
        nodes: all nodes of the round, by group rank.
        group_rank: which of them.

    Returns:
        One entry for each local rank, in order.

    Raises:
        IndexError: no such node.
    """
    if not 0 <= group_rank < len(nodes):
        raise IndexError(f"group rank {group_rank} of {len(nodes)} nodes")
    me = nodes[group_rank]
    before = nodes[:group_rank]
    first = sum(node.local_world_size for node in before)
    first_in_role = sum(node.local_world_size for node in before if node.role == me.role)
    world_size = sum(node.local_world_size for node in nodes)
    role_world_size = sum(node.local_world_size for node in nodes if node.role == me.role)
    return [
        WorkerRanks(
            role=me.role,
            local_rank=local_rank,
            global_rank=first + local_rank,
            group_rank=group_rank,
            role_rank=first_in_role + local_rank,
            local_world_size=me.local_world_size,
            world_size=world_size,
            group_world_size=len(nodes),
            role_world_size=role_world_size,
        )
        for local_rank in range(me.local_world_size)
    ]
