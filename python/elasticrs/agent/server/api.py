"""Torch's agent classes: agents that can be subclassed, and what they say of workers.

:class:`SimpleElasticAgent` runs the hooks of a subclass in torch's order, looking at the workers every
``monitor_interval``. The agent that waits instead of looking is
:class:`~elasticrs.agent.server.LocalElasticAgent`.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import socket
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from elasticrs import config as defaults
from elasticrs.agent.server import rank_exchange
from elasticrs.agent.server.worker_group import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
    _RoleInstanceInfo,
)
from elasticrs.multiprocessing.api import SignalException
from elasticrs.ranks import NodeShare, node_ranks
from elasticrs.rendezvous.api import RendezvousGracefulExitError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "DEFAULT_ROLE",
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
    "_RoleInstanceInfo",
]

DEFAULT_ROLE = "default"
_TERMINAL_STATE_SYNC_ID = rank_exchange.TERMINAL_STATE_SYNC_ID

_BARRIER_PERIOD = 0.1
"""Seconds between two looks at the exit barrier, at most."""

_log = logging.getLogger("elasticrs.agent")


def _get_fq_hostname() -> str:
    return socket.getfqdn(socket.gethostname())


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

    The hooks and their order are torch's. A subclass that was written for an older release is called as it
    was there: ``_stop_workers`` and ``_shutdown`` get those arguments that they take.

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
        self._in_exit_barrier = False

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:  # noqa: ARG002 -- torch's signature
        """See :class:`ElasticAgent`."""
        return self._worker_group

    @abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start them; their ids by local rank."""

    @abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop them all.

        In releases 2.5 and 2.6 of torch it had a second argument, ``is_restart``: a method that has one gets
        it.
        """

    @abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at them, without waiting."""

    @abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        """Release everything; workers that are still there get the signal.

        Older releases of torch know no ``timeout``, and 2.5 and 2.6 an ``is_restart``: a method gets what it
        has.
        """

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        spec = worker_group.spec
        info = spec.rdzv_handler.next_rendezvous()
        bootstrap = info.bootstrap_store_info
        self._store = info.store
        worker_group.workers = self._assign_worker_ranks(info.store, info.rank, info.world_size, spec)
        worker_group.store = info.store
        worker_group.group_rank = info.rank
        worker_group.group_world_size = info.world_size
        worker_group.master_addr = spec.master_addr or (bootstrap.master_addr if bootstrap else None)
        worker_group.master_port = spec.master_port or (bootstrap.master_port if bootstrap else None)
        _log.info(
            "[%s] round with %d node(s) complete: group rank %d, global ranks %s, workers meet at %s:%s",
            spec.role,
            info.world_size,
            info.rank,
            [worker.global_rank for worker in worker_group.workers],
            worker_group.master_addr,
            worker_group.master_port,
        )

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
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
        _call(self._stop_workers, worker_group, is_restart=True)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """See :class:`ElasticAgent`; whatever happens, ``_shutdown`` is called at the end.

        Raises:
            SignalException: a signal asked to stop; ``_shutdown`` has passed it on.
        """
        started = time.monotonic()
        is_shut_down = False
        try:
            return self._invoke_run(role)
        except RendezvousGracefulExitError as error:
            # In torch this returns nothing, which its launcher does not expect.
            _log.info("%s", error)
            self._worker_group.state = WorkerState.SUCCEEDED
            return RunResult(WorkerState.SUCCEEDED)
        except SignalException as error:
            _log.warning("%s received: shutting down", error.sigval.name)
            is_shut_down = True
            self._shut_down_for(error.sigval)
            raise
        finally:
            if not is_shut_down:
                _call(self._shutdown, timeout=self._shutdown_timeout)
            self._total_execution_time = int(time.monotonic() - started)

    def _shut_down_for(self, sigval: signal.Signals) -> None:
        try:
            _call(self._shutdown, sigval, timeout=self._shutdown_timeout)
        except SignalException:
            # Whoever asks twice wants it now.
            _call(self._shutdown, signal.SIGKILL, timeout=0)
            raise

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            self._pause(group.spec.monitor_interval)
            result = self._monitor_workers(group)
            group.state = result.state
            if result.state == WorkerState.SUCCEEDED:
                # Torch's hook returns nothing, and so may a user's.
                if self._exit_barrier() is not False:
                    return result
                # Another node has failed, and all run again.
                self._restart_workers(group)
            elif result.state in {WorkerState.UNHEALTHY, WorkerState.FAILED}:
                if self._remaining_restarts <= 0:
                    _call(self._stop_workers, group)
                    group.state = WorkerState.FAILED
                    # In torch UNHEALTHY stands, which is no failure to its launcher.
                    return RunResult(WorkerState.FAILED, result.return_values, result.failures)
                self._remaining_restarts -= 1
                self._restart_workers(group)
            elif result.state == WorkerState.HEALTHY:
                # A node that waits is let in; that costs no restart.
                if group.spec.rdzv_handler.num_nodes_waiting() > 0:
                    self._restart_workers(group)
            else:
                raise RuntimeError(f"worker group of role {role} is in state {result.state.name}")

    def _pause(self, seconds: float) -> None:
        """Wait between two looks; not in torch. A subclass that is told of events may return earlier."""
        time.sleep(seconds)

    def _exit_barrier(self) -> bool | None:
        """Wait until all nodes have finished, at most ``exit_barrier_timeout``.

        Returns:
            ``False``: the round has ended for another reason. Not in torch, whose hook returns nothing.
        """
        group = self._worker_group
        handler = group.spec.rdzv_handler
        set_succeeded = getattr(handler, "set_succeeded", None)
        if set_succeeded is not None:
            set_succeeded()
        if group.store is None or group.group_world_size is None or group.group_world_size == 1:
            return True
        self._in_exit_barrier = True
        try:
            # Another handler, as torch's, shows newcomers here: no reason to run again.
            return self._wait_for_others(group, watches=set_succeeded is not None)
        except RuntimeError as error:
            # As in torch: the work is done, and whoever served the store may have been the first to leave.
            _log.warning("the store was lost in the exit barrier: %s", error)
            return True
        finally:
            self._in_exit_barrier = False

    def _wait_for_others(self, group: WorkerGroup, *, watches: bool) -> bool:
        deadline = time.monotonic() + self._exit_barrier_timeout
        barrier = rank_exchange.ExitBarrier(group.store, group.group_world_size or 1)
        while not barrier.is_over():
            if watches and group.spec.rdzv_handler.num_nodes_waiting() > 0:
                return False
            left = deadline - time.monotonic()
            if left <= 0:
                _log.warning("other nodes have not finished in %g s", self._exit_barrier_timeout)
                break
            time.sleep(min(group.spec.monitor_interval, _BARRIER_PERIOD, left))
        return True


def _call(method: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Call a hook that may have been written for another release.

    Args:
        method: of a subclass.
        *arguments: what every release passes.
        **named: what only some do: ``timeout`` the newer ones, ``is_restart`` those that named it.
    """
    taken = inspect.signature(method).parameters
    kinds = {each.kind for each in taken.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds or "timeout" not in named:
        named = {name: value for name, value in named.items() if name in taken}
    method(*arguments, **named)
