"""Exchanges ranks between the agents of a round over the rendezvous store, with torch's keys and JSON format.

Agents of this package and agents of torch can therefore take part in the same round.
``torchelastic/role_info/<group_rank>`` holds the data that a node contributes,
``torchelastic/assigned_ranks/<group_rank>`` holds the assignment that the first node computes, and
``torchelastic/agent/terminal_state/`` is the barrier at the end.
"""

from __future__ import annotations

import json
from typing import Any

from elasticrs._engine.job.ranks import NodeRanks, NodeShare, node_ranks
from elasticrs.agent.server.worker_group import _RoleInstanceInfo
from elasticrs.utils.store import _barrier_nonblocking

TERMINAL_STATE_SYNC_ID = "torchelastic/agent/terminal_state"
_INFO = "torchelastic/role_info/"
_RANKS = "torchelastic/assigned_ranks/"


def exchange(store: Any, group_rank: int, group_world_size: int, own: NodeShare) -> NodeRanks:
    """Agree with the other nodes on the ranks of all workers. The timeout of the shared store applies."""
    told = _RoleInstanceInfo(own.role, group_rank, own.local_world_size)
    store.set(f"{_INFO}{group_rank}", told.serialize().decode())
    if group_rank == 0:
        groups = range(group_world_size)
        infos = map(_RoleInstanceInfo.deserialize, store.multi_get([f"{_INFO}{rank}" for rank in groups]))
        nodes = [NodeShare(str(info.role), int(info.local_world_size)) for info in infos]
        answers = [
            json.dumps([ranks.first_rank, ranks.world_size, ranks.first_role_rank, ranks.role_world_size])
            for ranks in node_ranks(nodes)
        ]
        store.multi_set([f"{_RANKS}{rank}" for rank in groups], answers)
    first, world_size, first_in_role, role_world_size = json.loads(store.get(f"{_RANKS}{group_rank}"))
    return NodeRanks(group_rank, group_world_size, first, world_size, first_in_role, role_world_size)


def begin_exit_barrier(store: Any, group_world_size: int) -> str:
    """Report to the other nodes that this node has finished. Return the key that is set once all nodes have
    finished.
    """
    return _barrier_nonblocking(store, group_world_size, TERMINAL_STATE_SYNC_ID)
