"""Torch's agent classes: what workers are, what state they are in, and agents that can be subclassed.

:class:`SimpleElasticAgent` runs the hooks of a subclass in torch's order, looking at the workers every
``monitor_interval``. The agent that waits instead of looking is
:class:`~elasticrs.agent.server.LocalElasticAgent`.
"""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from elasticrs import config as defaults
from elasticrs.agent.server import rank_exchange
from elasticrs.ranks import NodeShare, node_ranks
from elasticrs.rendezvous.api import RendezvousGracefulExitError, RendezvousHandler

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticrs.multiprocessing.errors import ProcessFailure

__all__ = [
    "DEFAULT_ROLE",
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]

DEFAULT_ROLE = "default"

_log = logging.getLogger("elasticrs.agent")


@dataclass
class WorkerSpec:
    """What the workers of one node are.

    Args:
        role: theirs.
        local_world_size: how many.
        rdzv_handler: how their node meets the others.
        fn: deprecated name of ``entrypoint``.
        entrypoint: a function or a program.
        args: for it.
        max_restarts: before the job fails.
        monitor_interval: seconds between two looks of :class:`SimpleElasticAgent`.
        master_port: of the workers' store; the rendezvous tells when ``None``.
        master_addr: of the workers' store; the rendezvous tells when ``None``.
        local_addr: of this node.
        event_log_handler: where events go; this release has none.
        numa_options: binds workers to CPUs; see :class:`elasticrs.numa.NumaOptions`.
        duplicate_stdout_filters: tee'd lines that contain one of these are copied to ``filtered_stdout``.
        duplicate_stderr_filters: the same for standard error.
        virtual_local_rank: every worker is local rank 0 to itself, and sees one GPU.
        hang_timeout: see :class:`elasticrs.launcher.LaunchConfig`.
        hang_startup_timeout: see there.

    Raises:
        AssertionError: no workers, no interval or no entrypoint (as in torch).
        ValueError: a limit of heartbeats that is none.
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
    hang_timeout: float | str | None = None
    hang_startup_timeout: float | None = None

    def __post_init__(self) -> None:
        if self.local_world_size <= 0:
            raise AssertionError("local_world_size must be positive")
        if self.monitor_interval <= 0:
            raise AssertionError("monitor_interval must be positive")
        defaults.check_hang_timeouts(self.hang_timeout, self.hang_startup_timeout)
        if self.fn:
            warnings.warn("WorkerSpec.fn is deprecated: use entrypoint", DeprecationWarning, stacklevel=3)
            self.entrypoint = self.fn
        if not self.entrypoint:
            raise AssertionError("an entrypoint is required")

    def get_entrypoint_name(self) -> str:
        """The base name of a program, the qualified name of a function."""
        if isinstance(self.entrypoint, str):
            return os.path.basename(self.entrypoint)
        if self.entrypoint is None:
            return ""
        return self.entrypoint.__qualname__


class Worker:
    """One worker of a group; -1 stands for a rank that is not assigned yet."""

    __slots__ = ("global_rank", "id", "local_rank", "role_rank", "role_world_size", "world_size")

    def __init__(
        self,
        local_rank: int,
        global_rank: int = -1,
        role_rank: int = -1,
        world_size: int = -1,
        role_world_size: int = -1,
    ) -> None:
        self.id: Any = None
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.role_rank = role_rank
        self.world_size = world_size
        self.role_world_size = role_world_size

    def __str__(self) -> str:
        return (
            f"local_rank={self.local_rank},global_rank={self.global_rank},role_rank={self.role_rank},"
            f"world_size={self.world_size},role_world_size={self.role_world_size}"
        )

    __repr__ = __str__


class WorkerState(str, Enum):
    """The state of a group of workers, which is that of all of them."""

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Whether the processes of such a group are there."""
        return state in {WorkerState.HEALTHY, WorkerState.UNHEALTHY}


class WorkerGroup:
    """The workers of one node.

    Attributes:
        store: shared by the nodes of the round, as torch's; ``None`` with one node.
    """

    __slots__ = (
        "_open_store",
        "_store",
        "group_rank",
        "group_world_size",
        "master_addr",
        "master_port",
        "spec",
        "state",
        "workers",
    )

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank) for local_rank in range(spec.local_world_size)]
        self._store: Any = None
        self._open_store: Callable[[], Any] | None = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT

    @property
    def store(self) -> Any:
        """See the class."""
        if self._open_store is not None:
            self.store = self._open_store()
        return self._store

    @store.setter
    def store(self, store: Any) -> None:
        self._store, self._open_store = store, None

    def share(self, open_store: Callable[[], Any]) -> None:
        """Have a store, which is opened by who looks at it first. Not in torch.

        Args:
            open_store: makes it.
        """
        self._store, self._open_store = None, open_store


@dataclass
class RunResult:
    """How a group ended, by **global** rank.

    Args:
        state: SUCCEEDED or FAILED at the end.
        return_values: of functions.
        failures: of those that failed.
    """

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Whether it failed."""
        return self.state == WorkerState.FAILED


class ElasticAgent(ABC):
    """Runs the workers of one node."""

    @abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run until the workers have succeeded, or failed too often."""

    @abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The workers; not to be changed."""


class SimpleElasticAgent(ElasticAgent):
    """An agent whose subclass says how workers are started, watched and stopped.

    Args:
        spec: the workers.
        exit_barrier_timeout: seconds to wait for other nodes at the end; from the environment or 300 when
            ``None``.
        shutdown_timeout: seconds between the signal and SIGKILL; from the environment or 30 when ``None``.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float | None = None,
        shutdown_timeout: float | None = None,
    ) -> None:
        self._worker_group = WorkerGroup(spec)
        self._remaining_restarts = spec.max_restarts
        self._store: Any = None
        self._exit_barrier_timeout = (
            defaults.exit_barrier_timeout_from(os.environ)
            if exit_barrier_timeout is None
            else exit_barrier_timeout
        )
        self._shutdown_timeout = (
            defaults.shutdown_timeout_from(os.environ) if shutdown_timeout is None else shutdown_timeout
        )
        self._total_execution_time = 0

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:  # noqa: ARG002 -- torch's signature
        """See :class:`ElasticAgent`."""
        return self._worker_group

    @abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start them; their ids by local rank."""

    @abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop them all."""

    @abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at them, without waiting."""

    @abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        """Release everything; workers that are still there get the signal."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        spec = worker_group.spec
        info = spec.rdzv_handler.next_rendezvous()
        bootstrap = info.bootstrap_store_info
        self._store = worker_group.store = info.store
        worker_group.group_rank = info.rank
        worker_group.group_world_size = info.world_size
        worker_group.workers = self._assign_worker_ranks(info.store, info.rank, info.world_size, spec)
        worker_group.master_addr = spec.master_addr or (bootstrap.master_addr if bootstrap else None)
        worker_group.master_port = spec.master_port or (bootstrap.master_port if bootstrap else None)

    def _assign_worker_ranks(
        self,
        store: Any,
        group_rank: int,
        group_world_size: int,
        spec: WorkerSpec,
    ) -> list[Worker]:
        """Agree on ranks over the store, in torch's terms; without it where all nodes are alike, which is to
        say with one node, or with ``TORCH_ELASTIC_WORKER_IDENTICAL=1``.
        """
        own = NodeShare(spec.role, spec.local_world_size)
        if group_world_size == 1 or os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL", "0") == "1":
            ranks = node_ranks([own] * group_world_size)[group_rank]
        else:
            ranks = rank_exchange.exchange(store, group_rank, group_world_size, own)
        return [
            Worker(each.local_rank, each.global_rank, each.role_rank, each.world_size, each.role_world_size)
            for each in ranks.workers(own)
        ]

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        self._rendezvous(worker_group)
        ids = self._start_workers(worker_group)
        for local_rank, worker_id in ids.items():
            worker_group.workers[local_rank].id = worker_id
        worker_group.state = WorkerState.HEALTHY

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """See :class:`ElasticAgent`; whatever happens, ``_shutdown`` is called at the end."""
        started = time.monotonic()
        try:
            return self._invoke_run(role)
        except RendezvousGracefulExitError as error:
            # In torch this returns nothing, which its launcher does not expect.
            _log.info("%s", error)
            self._worker_group.state = WorkerState.SUCCEEDED
            return RunResult(WorkerState.SUCCEEDED)
        finally:
            self._shutdown()
            self._total_execution_time = int(time.monotonic() - started)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        group = self.get_worker_group(role)
        self._initialize_workers(group)
        while True:
            time.sleep(group.spec.monitor_interval)
            result = self._monitor_workers(group)
            group.state = result.state
            if result.state == WorkerState.SUCCEEDED:
                if self._exit_barrier(group):
                    return result
                # Another node has failed, and all run again.
                self._restart_workers(group)
            elif result.state in {WorkerState.UNHEALTHY, WorkerState.FAILED}:
                if self._remaining_restarts <= 0:
                    self._stop_workers(group)
                    group.state = WorkerState.FAILED
                    return RunResult(WorkerState.FAILED, failures=result.failures)
                self._remaining_restarts -= 1
                self._restart_workers(group)
            elif result.state == WorkerState.HEALTHY:
                # A node that waits is let in; that costs no restart.
                if group.spec.rdzv_handler.num_nodes_waiting() > 0:
                    self._restart_workers(group)
            else:
                raise RuntimeError(f"worker group of role {role} is in state {result.state.name}")

    def _exit_barrier(self, group: WorkerGroup) -> bool:
        """Wait until all nodes have finished, at most ``exit_barrier_timeout``.

        Returns:
            Whether that is all; otherwise the round has ended for another reason.
        """
        handler = group.spec.rdzv_handler
        set_succeeded = getattr(handler, "set_succeeded", None)
        if set_succeeded is not None:
            set_succeeded()
        if group.store is None or group.group_world_size is None or group.group_world_size == 1:
            return True
        deadline = time.monotonic() + self._exit_barrier_timeout
        try:
            barrier = rank_exchange.ExitBarrier(group.store, group.group_world_size)
            while not barrier.is_over():
                # Another handler, as torch's, shows newcomers here: no reason to run again.
                if set_succeeded is not None and handler.num_nodes_waiting() > 0:
                    return False
                left = deadline - time.monotonic()
                if left <= 0:
                    _log.warning("other nodes have not finished in %g s", self._exit_barrier_timeout)
                    break
                time.sleep(min(group.spec.monitor_interval, left))
        except RuntimeError as error:
            # As in torch: the work is done, and whoever served the store may have been the first to leave.
            _log.warning("the store was lost in the exit barrier: %s", error)
        return True
