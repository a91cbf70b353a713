"""Torch's base classes for agents, including their events and metrics."""

from __future__ import annotations

import inspect
import json
import logging
import os
import signal
import time
import traceback
from abc import ABC, abstractmethod
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from elasticrs._engine.job import config as defaults
from elasticrs._engine.job.value import Record
from elasticrs._engine.supervise.decide.handler_nodes import agreed_ranks, wait_for_others
from elasticrs._engine.workers.plan import NodeShare
from elasticrs.agent.server.worker_group import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
    _RoleInstanceInfo,
)
from elasticrs.events import STATUS, Event, EventSource, details_of_worker, record, status_metadata
from elasticrs.events.api import fq_hostname as _get_fq_hostname  # noqa: F401 -- torch exports it here
from elasticrs.metrics import prof, put_metric
from elasticrs.multiprocessing.api import SignalException
from elasticrs.rendezvous.api import RendezvousGracefulExitError, is_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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

_log = logging.getLogger("elasticrs.agent")


class ElasticAgent(ABC):
    """Base class of agents. An agent runs the workers of one node."""

    @abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run until the workers have succeeded, or have failed too often."""

    @abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the worker group. The caller must not modify it."""


class SimpleElasticAgent(ElasticAgent):
    """Agent whose subclass defines how workers are started, monitored and stopped, as in torch.

    ``_stop_workers`` and ``_shutdown`` get only the arguments that they accept, because torch's releases
    differ. A hook that takes long can call ``_tell_progress``, so that health checks do not take the agent
    for hung.

    Args:
        spec: specification of the workers.
        exit_barrier_timeout: seconds to wait for other nodes; if ``None``, from the environment, or 300.
        shutdown_timeout: seconds between stop signal and SIGKILL; if ``None``, from the environment, or 30.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float | None = None,
        shutdown_timeout: float | None = None,
    ) -> None:
        self._worker_group = WorkerGroup(spec)
        self._remaining_restarts = spec.max_restarts
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
        self._progress = Progress()

    @property
    def _store(self) -> Any:
        return self._worker_group.store

    @_store.setter
    def _store(self, store: Any) -> None:
        self._worker_group.store = store

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:  # noqa: ARG002 -- torch's signature
        return self._worker_group

    @abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers of the group. Return their ids by local rank."""

    @abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop all workers. A subclass may add a parameter ``is_restart``, as in torch 2.5."""

    @abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the workers without waiting."""

    @abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        """Send ``death_sig`` to running workers and release all resources. Overrides may omit ``timeout``."""

    @prof
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        spec = worker_group.spec
        with self.record_duration("RENDEZVOUS"):
            info = spec.rdzv_handler.next_rendezvous()
        bootstrap = info.bootstrap_store_info
        worker_group.store = info.store
        with self.record_duration("ASSIGN_WORKER_RANKS"):
            workers = self._assign_worker_ranks(info.store, info.rank, info.world_size, spec)
        worker_group.workers = workers
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

    @prof
    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Assign ranks to the workers.

        Exchange data through the store only if nodes may differ in their workers or roles.
        """
        own = NodeShare(spec.role, spec.local_world_size)
        ranks = agreed_ranks(store, group_rank, group_world_size, own)
        return [
            Worker(each.local_rank, each.global_rank, each.role_rank, each.world_size, each.role_world_size)
            for each in ranks.workers(own)
        ]

    @prof
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        with self._progress.within("_rendezvous", UNLIMITED):
            self._rendezvous(worker_group)
        with self._progress.within("_start_workers", START_ALLOWANCE):
            ids = self._start_workers(worker_group)
        for local_rank, worker_id in ids.items():
            worker = worker_group.workers[local_rank]
            worker.id = worker_id
            event = self._construct_event("START", EventSource.WORKER, worker)
            record(event, worker_group.spec.event_log_handler)
        worker_group.state = WorkerState.HEALTHY

    @prof
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        with self._progress.within("_stop_workers", self._shutdown_timeout):
            _call(self._stop_workers, worker_group, is_restart=True)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    @prof
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers, and always call ``_shutdown`` afterwards. See :class:`ElasticAgent`."""
        return self._run_and_shut_down(partial(self._invoke_run, role))

    def _run_and_shut_down(self, invoke: Callable[[], RunResult], *, is_observed: bool = False) -> RunResult:
        """Call ``invoke``, and then ``_shutdown``.

        If ``is_observed``, observers record the events and metrics of the run.
        """
        started = time.monotonic()
        is_shut_down = False
        try:
            result = invoke()
            self._total_execution_time = int(time.monotonic() - started)
            if not is_observed:
                self._record_metrics(result)
                self._record_worker_events(result)
            return result
        except SignalException as error:
            _log.warning("%s received: shutting down", error.sigval.name)
            is_shut_down = True
            self._shut_down_for(error.sigval)
            raise
        except Exception as error:
            if not is_kind(error, RendezvousGracefulExitError):
                raise
            # Torch's agent returns `None` after a graceful exit, which torch's own launcher cannot handle.
            _log.info("%s", error)
            self._worker_group.state = WorkerState.SUCCEEDED
            return RunResult(WorkerState.SUCCEEDED)
        finally:
            if not is_shut_down:
                with self._progress.within("_shutdown", self._shutdown_timeout):
                    _call(self._shutdown, timeout=self._shutdown_timeout)
            self._total_execution_time = int(time.monotonic() - started)

    def _shut_down_for(self, sigval: signal.Signals) -> None:
        with self._progress.within("_shutdown", self._shutdown_timeout):
            try:
                _call(self._shutdown, sigval, timeout=self._shutdown_timeout)
            except SignalException:
                # A second stop request kills the workers at once.
                _call(self._shutdown, signal.SIGKILL, timeout=0)
                raise

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            with self._progress.within("_pause", group.spec.monitor_interval):
                self._pause(group.spec.monitor_interval)
            with self._progress.within("_monitor_workers", 0):
                result = self._monitor_workers(group)
            group.state = result.state
            put_metric(f"workers.{group.spec.role}.remaining_restarts", self._remaining_restarts)
            put_metric(f"workers.{group.spec.role}.{result.state.name.lower()}", 1)
            if result.state == WorkerState.SUCCEEDED:
                # Treat `None` as success, because overrides of torch's `_exit_barrier` may return it.
                with self._progress.within("_exit_barrier", self._exit_barrier_timeout):
                    is_over = self._exit_barrier() is not False
                if is_over:
                    return result
                self._restart_workers(group)
            elif result.state in {WorkerState.UNHEALTHY, WorkerState.FAILED}:
                if self._remaining_restarts <= 0:
                    with self._progress.within("_stop_workers", self._shutdown_timeout):
                        _call(self._stop_workers, group)
                    group.state = WorkerState.FAILED
                    # Do not return UNHEALTHY, because torch's launcher does not treat it as a failure.
                    return RunResult(WorkerState.FAILED, result.return_values, result.failures)
                self._remaining_restarts -= 1
                self._tell_restart(result.state)
                self._restart_workers(group)
            elif result.state == WorkerState.HEALTHY:
                # Restart the workers, so that a waiting node can join. This restart does not count towards
                # the maximum number of restarts.
                with self._progress.within("num_nodes_waiting", 0):
                    are_waiting = group.spec.rdzv_handler.num_nodes_waiting() > 0
                if are_waiting:
                    self._restart_workers(group)
            else:
                raise RuntimeError(f"worker group of role {role} is in state {result.state.name}")

    def _tell_restart(self, state: WorkerState) -> None:
        left, most = self._remaining_restarts, self._worker_group.spec.max_restarts
        _log.warning("the workers are %s; restarting, %d of %d left", state.name, left, most)

    def _get_alive_time(self) -> float:
        """Return when the agent last made progress, in seconds since 1970.

        As long as no hook is late, this is now.
        """
        return time.time() - self._progress.overdue()[0]

    def _tell_progress(self, seconds: float = 0.0) -> None:
        """Report that the agent makes progress, from any thread.

        The next report is due in ``seconds``. Not available in torch.
        """
        self._progress.tell(seconds)

    def _pause(self, seconds: float) -> None:
        """Wait before the next check of the workers. An override may return early. Not available in torch."""
        time.sleep(seconds)

    def _exit_barrier(self) -> bool | None:
        """Wait until all nodes have finished.

        Return ``False`` if the rendezvous round has ended for another reason.
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
            return wait_for_others(
                group.store,
                group.group_world_size,
                self._exit_barrier_timeout,
                group.spec.monitor_interval,
                # Ask only elasticrs's rendezvous handlers for waiting nodes. Torch's also count new nodes,
                # which are no reason to restart.
                has_ended=lambda: set_succeeded is not None and handler.num_nodes_waiting() > 0,
                pause=time.sleep,
                say=_log.warning,
            )
        except RuntimeError as error:
            # Ignore this error, as torch does: the work is done, and the node that hosts the store may have
            # exited already.
            _log.warning("the store was lost in the exit barrier: %s", error)
            return True
        finally:
            self._in_exit_barrier = False

    def get_event_failed(self) -> Event:
        """Return the event that reports this agent's failure.

        It contains the exception that is being handled.
        """
        return self._construct_event("FAILED", EventSource.AGENT, raw_error=traceback.format_exc())

    def get_event_succeeded(self) -> Event:
        """Return the event that reports this agent's success."""
        return self._construct_event("SUCCEEDED", EventSource.AGENT)

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        """Record the duration of the block as an event for ``state``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            milliseconds = (time.perf_counter() - started) * 1000
            event = self._construct_event(state, EventSource.AGENT, duration_ms=milliseconds)
            record(event, self._worker_group.spec.event_log_handler)

    def _record_worker_events(self, result: RunResult) -> None:
        for worker in self._worker_group.workers:
            failure = result.failures.get(worker.global_rank)
            event = self._construct_event(
                self._get_worker_state(worker, result),
                EventSource.WORKER,
                worker,
                raw_error=json.dumps(failure.error_file_data) if failure else None,
                exit_code=failure.exitcode if failure else None,
                worker_pid=failure.pid if failure else None,
            )
            record(event, self._worker_group.spec.event_log_handler)

    def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
        has_failed = worker.global_rank in result.failures
        if result.state in {WorkerState.UNHEALTHY, WorkerState.FAILED} and not has_failed:
            return "TERMINATED"
        # A program has no return value, and the result of a subclass may lack the values of functions.
        if has_failed or worker.global_rank in result.return_values or not result.return_values:
            return result.state.value
        raise ValueError(f"Unknown worker: {worker.global_rank}")

    def _construct_event(
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        group, spec = self._worker_group, self._worker_group.spec
        inner: dict[str, Any] = {
            "group_world_size": group.group_world_size,
            "entry_point": spec.get_entrypoint_name(),
        }
        known: dict[str, Any] = {"raw_error": raw_error, "duration_ms": duration_ms}
        if worker is not None:
            inner |= details_of_worker(worker, exit_code, worker_pid)
            known |= {"global_rank": worker.global_rank, "worker_id": str(worker.id)}
        metadata = status_metadata(
            state,
            inner,
            # Do not look up the full host name if events are discarded, because the lookup may be slow.
            hostname=os.uname().nodename if spec.event_log_handler == "null" else None,
            run_id=spec.rdzv_handler.get_run_id(),
            group_rank=group.group_rank,
            role=spec.role,
            total_run_time=self._total_execution_time,
            rdzv_backend=spec.rdzv_handler.get_backend(),
            agent_restarts=spec.max_restarts - self._remaining_restarts,
            **known,
        )
        return Event(f"{STATUS}{state}", source, metadata=metadata)

    def _record_metrics(self, group_results: RunResult) -> None:
        failed, spec = group_results.is_failed(), self._worker_group.spec
        restarted = self._remaining_restarts != spec.max_restarts
        self._record_flakiness_metric(failed)
        put_metric(f"workers.{spec.role}.run_total", 1)
        for outcome, is_it in (("success", not failed), ("failed", failed)):
            self._record_metric_with_condition(f"run_{outcome}_with_retries", is_it and restarted)
            self._record_metric_with_condition(f"run_{outcome}_no_retries", is_it and not restarted)

    def _record_metric_with_condition(self, metric_name: str, condition: bool) -> None:
        put_metric(f"workers.{self._worker_group.spec.role}.{metric_name}", 1 if condition else 0)

    def _record_flakiness_metric(self, is_failed: bool = False) -> None:
        spec = self._worker_group.spec
        left = (self._remaining_restarts + 1) / (spec.max_restarts + 1)
        flakiness = 100.0 if is_failed else 100.0 - 100.0 * left
        put_metric(f"workers.{spec.role}.flakiness", int(flakiness))


def _call(method: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Call a hook with only those arguments in ``named`` that it accepts, because torch's releases differ."""
    taken = inspect.signature(method).parameters
    kinds = {each.kind for each in taken.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds or "timeout" not in named:
        named = {name: value for name, value in named.items() if name in taken}
    method(*arguments, **named)


__all__ = ["START_ALLOWANCE", "UNLIMITED", "Progress"]

UNLIMITED = inf

START_ALLOWANCE = 600.0
"""Seconds that starting the workers may take, with waiting for machines or downloads."""


class Progress:
    """What an agent is doing, and when it must report progress at the latest, if at all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._place: _Place | None = None

    @contextmanager
    def within(self, name: str, allowance: float) -> Iterator[None]:
        """Expect that the block ends or reports progress within ``allowance`` seconds.

        Inner blocks with limits of their own do not count.
        """
        outer = self._place
        try:
            self._place = _Place(name, allowance, self._clock() + allowance)
            yield
        finally:
            # Inner blocks may not have restored `_place`, if a signal handler has raised an exception in
            # them.
            self._place = outer
            self.renew()

    def tell(self, seconds: float = 0.0) -> None:
        """Report progress of the current activity.

        The next report is due in ``seconds``. Can be called from any thread.
        """
        place = self._place
        if place is not None:
            place.silent_until = self._clock() + seconds

    def renew(self) -> None:
        """Restart the time limit of the current activity, because the process was suspended meanwhile."""
        place = self._place
        if place is not None:
            self.tell(place.allowance)

    def overdue(self) -> tuple[float, str | None]:
        """Return by how many seconds the report of progress is overdue, and the current activity.

        Can be called from any thread.
        """
        place = self._place
        if place is None:
            return 0.0, None
        return max(0.0, self._clock() - place.silent_until), place.name


class _Place(Record):
    name: str
    allowance: float
    silent_until: float
