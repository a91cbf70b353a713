"""Assign ranks to workers. As in torch, every node computes the same assignment. All functions are pure.

Global ranks follow the order of group ranks. Role ranks only count workers with the same role.
"""

from __future__ import annotations

from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class NodeShare(Value):
    role: str
    local_world_size: int


class WorkerRanks(Value):
    role: str
    local_rank: int
    global_rank: int
    group_rank: int
    role_rank: int
    local_world_size: int
    world_size: int
    group_world_size: int
    role_world_size: int


def assign(nodes: Sequence[NodeShare], group_rank: int) -> list[WorkerRanks]:
    """Return the ranks of one node's workers, by local rank. ``nodes`` is in the order of group ranks."""
    if not 0 <= group_rank < len(nodes):
        raise IndexError(f"group rank {group_rank} of {len(nodes)} nodes")
    return node_ranks(nodes)[group_rank].workers(nodes[group_rank])


class NodeRanks(Value):
    """Ranks and world sizes of a node. ``group_world_size`` counts nodes, the others count workers."""

    group_rank: int
    group_world_size: int
    first_rank: int
    world_size: int
    first_role_rank: int
    role_world_size: int

    def workers(self, me: NodeShare) -> list[WorkerRanks]:
        return [
            WorkerRanks(
                role=me.role,
                local_rank=local_rank,
                global_rank=self.first_rank + local_rank,
                group_rank=self.group_rank,
                role_rank=self.first_role_rank + local_rank,
                local_world_size=me.local_world_size,
                world_size=self.world_size,
                group_world_size=self.group_world_size,
                role_world_size=self.role_world_size,
            )
            for local_rank in range(me.local_world_size)
        ]


def node_ranks(nodes: Sequence[NodeShare]) -> list[NodeRanks]:
    """Return the ranks of each node's first worker, in the order of group ranks, in linear time."""
    sizes: dict[str, int] = {}
    for node in nodes:
        sizes[node.role] = sizes.get(node.role, 0) + node.local_world_size
    world_size = sum(sizes.values())
    first, first_in_role, ranks = 0, dict.fromkeys(sizes, 0), []
    for group_rank, node in enumerate(nodes):
        role_rank = first_in_role[node.role]
        ranks.append(NodeRanks(group_rank, len(nodes), first, world_size, role_rank, sizes[node.role]))
        first += node.local_world_size
        first_in_role[node.role] = role_rank + node.local_world_size
    return ranks
