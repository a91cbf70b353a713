"""Torch's classes for workers: their specification, ranks, state and results."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from elasticrs._engine.job import config as defaults
from elasticrs._engine.job import options
from elasticrs._engine.job.config import UnresolvedSettings, WorkerSettings
from elasticrs._engine.workers.plan import Plan, StorePort, WorkerRanks
from elasticrs.rendezvous.api import RendezvousError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from elasticrs.multiprocessing.errors import ProcessFailure
    from elasticrs.rendezvous.api import RendezvousHandler

    T = TypeVar("T")


def with_settings(made: type[T]) -> type[T]:
    """Make the inherited fields of a class keyword-only, so that torch's own fields keep their positions."""
    made.__annotations__["_"] = KW_ONLY
    for base in made.__bases__:
        made.__annotations__ |= base.__annotations__
    return made


@dataclass
@with_settings
class WorkerSpec(WorkerSettings, UnresolvedSettings):
    """Specification of the workers of one node.

    Torch does not have the keyword-only fields; see :class:`.WorkerSettings` and
    :class:`.UnresolvedSettings`. For other fields that are not listed here, see
    :class:`~elasticrs.launcher.LaunchConfig`.

    Args:
        local_world_size: number of workers on this node.
        rdzv_handler: rendezvous handler of this node.
        fn: deprecated name of ``entrypoint``.
        entrypoint: function or program that the workers run.
        args: arguments of the entrypoint.
        monitor_interval: seconds between two polls of the workers by :class:`SimpleElasticAgent`.
        master_port: port of the workers' store; determined by the rendezvous if ``None``.
        master_addr: address of the workers' store; determined by the rendezvous if ``None``.

    Raises:
        AssertionError: the number of workers or the interval is not positive, or there is no entrypoint.
        ValueError: a setting is invalid.
    """

    role: str
    local_world_size: int
    rdzv_handler: RendezvousHandler
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = defaults.DEFAULT_MONITOR_INTERVAL
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        if self.local_world_size <= 0:
            raise AssertionError("local_world_size must be positive")
        if self.monitor_interval <= 0:
            raise AssertionError("monitor_interval must be positive")
        options.check(self)
        if self.log_prefix is None:
            self.log_prefix = defaults.log_prefix_from(os.environ)
        if self.fn:
            warnings.warn("WorkerSpec.fn is deprecated: use entrypoint", DeprecationWarning, stacklevel=3)
            self.entrypoint = self.fn
        if not self.entrypoint:
            raise AssertionError("an entrypoint is required")

    def get_entrypoint_name(self) -> str:
        """Return the base name of a program or the qualified name of a function."""
        if isinstance(self.entrypoint, str):
            return os.path.basename(self.entrypoint)
        if self.entrypoint is None:
            return ""
        return self.entrypoint.__qualname__


@dataclass(repr=False, eq=False)
class Worker:
    """A worker of a group. A rank is -1 until it is assigned."""

    local_rank: int
    global_rank: int = -1
    role_rank: int = -1
    world_size: int = -1
    role_world_size: int = -1
    id: Any = field(default=None, init=False)

    def __str__(self) -> str:
        return (
            f"local_rank={self.local_rank},global_rank={self.global_rank},role_rank={self.role_rank},"
            f"world_size={self.world_size},role_world_size={self.role_world_size}"
        )

    __repr__ = __str__


class WorkerState(str, Enum):
    """State of a worker group, shared by all workers of the group."""

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Return true if a group in this state has running processes."""
        return state in {WorkerState.HEALTHY, WorkerState.UNHEALTHY}


class WorkerGroup:
    """The workers of one node, and their data in the current rendezvous round."""

    workers: list[Worker]
    group_rank: int | None = None
    group_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    state: WorkerState = WorkerState.INIT

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank) for local_rank in range(spec.local_world_size)]
        self._store: Any = None
        self._open_store: Callable[[], Any] | None = None

    @property
    def store(self) -> Any:
        """The store shared by the nodes of the round. It is opened when this property is first read."""
        if self._open_store is not None:
            self.store = self._open_store()
        return self._store

    @store.setter
    def store(self, store: Any) -> None:
        self._store, self._open_store = store, None

    def take_plan(self, plan: Plan, open_store: Callable[[], Any]) -> None:
        """Copy the plan of the next attempt to this group.

        If the user has chosen a port or address, keep that one.
        """
        plan.master_addr = self.spec.master_addr or plan.master_addr
        if self.spec.master_port:
            # The worker with rank 0 hosts the store on a port that the user has chosen.
            plan.master_port, plan.use_agent_store = self.spec.master_port, False
        self._store, self._open_store = None, open_store
        self.group_rank, self.group_world_size = plan.ranks[0].group_rank, plan.ranks[0].group_world_size
        self.master_addr, self.master_port = plan.master_addr, plan.master_port
        for worker, own in zip(self.workers, plan.ranks, strict=True):
            worker.global_rank, worker.role_rank = own.global_rank, own.role_rank
            worker.world_size, worker.role_world_size = own.world_size, own.role_world_size

    def plan(self) -> Plan:
        """Return the plan of the current attempt.

        Raise ``RuntimeError`` before the first rendezvous. Not available in torch.
        """
        spec = self.spec
        if self.group_rank is None or self.group_world_size is None:
            raise RuntimeError("workers are started before a rendezvous")
        ranks = [
            WorkerRanks(
                *(spec.role, worker.local_rank, worker.global_rank, self.group_rank, worker.role_rank),
                *(spec.local_world_size, worker.world_size, self.group_world_size, worker.role_world_size),
            )
            for worker in self.workers
        ]
        port = None
        if self.master_port is None:
            if self.group_world_size > 1:
                raise RendezvousError("the rendezvous gave no port for the workers' store")
            port = StorePort(is_served=False)
            self.master_port = port.number
        # The worker with rank 0 hosts the store on a port that the user has chosen.
        use_agent_store = spec.rdzv_handler.use_agent_store and spec.master_port is None
        address = self.master_addr or "localhost"
        return Plan(ranks, address, self.master_port, port, use_agent_store=use_agent_store)


@dataclass
class RunResult:
    """Result of a worker group. The dictionaries are keyed by **global** rank.

    Args:
        state: state of the group; SUCCEEDED or FAILED at the end.
        return_values: return values of the workers' functions.
        failures: failures of the failed workers.
        verdict: see :class:`elasticrs.errors.JobFailedError`; ``None`` without failure or if the agent polls.
        exit_code: exit code of the launcher for this failure; ``None`` if ``verdict`` is ``None``.
        reason: why the workers were not restarted; ``None`` if the failures alone explain it.
    """

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    _: KW_ONLY
    verdict: str | None = None
    exit_code: int | None = None
    reason: str | None = None

    def is_failed(self) -> bool:
        """Return true if the workers failed."""
        return self.state == WorkerState.FAILED


@dataclass(repr=False, eq=False)
class _RoleInstanceInfo:
    """What an agent tells the other agents about the workers of its node, in torch's JSON format."""

    role: str
    rank: int
    local_world_size: int

    def serialize(self) -> bytes:
        told = {"role": self.role, "rank": self.rank, "local_world_size": self.local_world_size}
        return json.dumps(told).encode()

    @staticmethod
    def deserialize(data: bytes) -> _RoleInstanceInfo:
        told = json.loads(data)
        return _RoleInstanceInfo(told["role"], told["rank"], told["local_world_size"])

    @staticmethod
    def compare(obj1: _RoleInstanceInfo, obj2: _RoleInstanceInfo) -> int:
        if obj1.role == obj2.role:
            return obj1.rank - obj2.rank
        return 1 if obj1.role > obj2.role else -1

    @staticmethod
    def find_role_boundaries(roles_infos: Sequence[_RoleInstanceInfo], role: str) -> tuple[int, int]:
        places = [place for place, info in enumerate(roles_infos) if info.role == role]
        return (places[0], places[-1]) if places else (-1, -1)
