"""A child that a worker forks while it trains is no worker, as those of a data loader are not.

It has copies of the process group, whose connections are its parent's and whose threads it lacks. So a
collective in it would wait for ever; it raises instead.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_COLLECTIVES = (
    *("allgather", "allgather_into_tensor_coalesced", "_allgather_base", "allreduce", "allreduce_coalesced"),
    *(
        "alltoall",
        "alltoall_base",
        "barrier",
        "broadcast",
        "gather",
        "monitored_barrier",
        "recv",
        "recv_anysource",
    ),
    *(
        "reduce",
        "reduce_scatter",
        "_reduce_scatter_base",
        "reduce_scatter_tensor_coalesced",
        "scatter",
        "send",
    ),
)

_state: dict[str, Any] = {"count": 0, "parent": 0, "is_watched": False, "kept": []}


def count() -> int:
    """Return how often this process has been forked off another one since the first loop."""
    found: int = _state["count"]
    return found


def message() -> str:
    """Return what is wrong, in a child."""
    return (
        f"this process was forked from worker {_state['parent']} while it trained: it is no worker of the job"
    )


def watch() -> None:
    """Notice forks from now on. Idempotent."""
    _state["parent"] = os.getpid()
    if not _state["is_watched"]:
        _state["is_watched"] = True
        os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    _state["count"] += 1
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    group = None if c10d is None else c10d.GroupMember.WORLD
    if group is None:
        return
    refusing = _refusing(group)
    # Who only asks for rank, size or back end is answered, as before.
    for table in (
        *(c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks),
        *(c10d._world.pg_backend_config, c10d._world.pg_to_tag),
    ):
        if group in table:
            table[refusing] = table[group]
    # The end of the old one would wait for its threads.
    _state["kept"].append(group)
    c10d.GroupMember.WORLD = refusing


def _refusing(group: ProcessGroup) -> ProcessGroup:
    from torch.distributed import ProcessGroup

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(message())

    kind = type("_Refusing", (ProcessGroup,), dict.fromkeys(_COLLECTIVES, refuse))
    made: ProcessGroup = kind(group.rank(), group.size())
    return made
