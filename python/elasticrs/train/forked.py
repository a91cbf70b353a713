"""Make collectives raise an error in child processes that a worker forks during training, such as data
loaders.

Such a child is not a worker. It has a copy of the process group, but the connections belong to its parent and
the threads of the group do not exist in the child. Without this module, a collective in the child would block
forever.
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
    """Return the fork depth of this process: 0 in the process that first called :func:`watch`, 1 in its
    forked children, and so on.
    """
    found: int = _state["count"]
    return found


def message() -> str:
    """Return the error message for a forked child that tries to act as a worker."""
    return (
        f"this process was forked from worker {_state['parent']} during the training, so it is not a worker"
    )


def watch() -> None:
    """Start to detect forks of this process. Idempotent."""
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
    # Register the new group in torch's tables like the old one, so that queries for the rank, size or backend
    # still work.
    for table in (
        *(c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks),
        *(c10d._world.pg_backend_config, c10d._world.pg_to_tag),
    ):
        if group in table:
            table[refusing] = table[group]
    # Keep the old group alive. Its destructor would wait for threads that do not exist in this process.
    _state["kept"].append(group)
    c10d.GroupMember.WORLD = refusing


def _refusing(group: ProcessGroup) -> ProcessGroup:
    from torch.distributed import ProcessGroup

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(message())

    kind = type("_Refusing", (ProcessGroup,), dict.fromkeys(_COLLECTIVES, refuse))
    made: ProcessGroup = kind(group.rank(), group.size())
    return made
