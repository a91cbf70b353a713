"""The agent that runs functions or programs on this node and waits for events instead of polling.

It takes torch's :class:`~elasticrs.agent.server.WorkerSpec` and runs the same loop as the command line.
"""

from __future__ import annotations

import os
import time
import warnings
from typing import TYPE_CHECKING

from elasticrs import _core
from elasticrs import config as defaults
from elasticrs._worker import hook_environment
from elasticrs.agent.attempt import Plan
from elasticrs.agent.console import Console
from elasticrs.agent.decisions import OneNode
from elasticrs.agent.loop import Agent, JobResult
from elasticrs.agent.observing import make_observers
from elasticrs.agent.server.api import (
    DEFAULT_ROLE,
    ElasticAgent,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from elasticrs.agent.server.health_check_server import HealthCheckServer as OurServer
from elasticrs.agent.server.health_check_server import server_of_environment
from elasticrs.agent.signals import catch_signals, ignored_signals
from elasticrs.agent.state import Phase
from elasticrs.config import JobConfig, ObserveSettings
from elasticrs.multiprocessing.plugins import attempt_logs
from elasticrs.ports import ReservedPort
from elasticrs.ranks import NodeShare, assign
from elasticrs.rendezvous.api import RendezvousClosedError, RendezvousError
from elasticrs.rendezvous.static import OneNodeRendezvous
from elasticrs.workers import CommandWorkers, Workers, WorkerSetup

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from elasticrs.agent.decisions import Decisions
    from elasticrs.multiprocessing.api import LogsSpecs
    from elasticrs.rendezvous.elastic.messages import Outcome
    from elasticrs.rendezvous.elastic.settings import Rendezvous
    from elasticrs.store import Store

    class HealthCheckServer(Protocol):
        """What torch calls a health check server."""

        def start(self) -> None: ...

        def stop(self) -> None: ...


__all__ = ["LocalElasticAgent"]


class LocalElasticAgent(ElasticAgent):
    """Runs the workers of one node.

    Args:
        spec: the workers.
        logs_specs: where their output goes.
        start_method: for functions; ``spawn`` in this release.
        exit_barrier_timeout: seconds to wait for other nodes at the end; from the environment or 300 when
            ``None``.
        log_line_prefix_template: before tee'd lines.
        shutdown_timeout: seconds between the signal and SIGKILL; from the environment or 30 when ``None``.
        health_check_server: started before the workers and stopped after them: anything with ``start`` and
            ``stop``.
        uninterruptible_state_timeout: not supported by this release.
        signals_to_handle: names; from ``TORCHELASTIC_SIGNALS_TO_HANDLE``, or the usual four, when ``None``.

    Raises:
        ValueError: what this release does not support, or names that are no signals.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float | None = None,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float | None = None,
        health_check_server: HealthCheckServer | None = None,
        uninterruptible_state_timeout: float | None = None,
        *,
        signals_to_handle: str | None = None,
    ) -> None:
        if callable(spec.entrypoint) and start_method != "spawn":
            raise ValueError(f"start_method {start_method!r} is not supported by this release: use 'spawn'")
        if uninterruptible_state_timeout is not None:
            raise ValueError("uninterruptible_state_timeout is not supported by this release")
        names = signals_to_handle or os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
        try:
            self._signals = defaults.parse_signals(names or defaults.DEFAULT_SIGNALS)
        except ValueError as error:
            raise ValueError(f"signals_to_handle: expected {error}") from None
        self._signal_names = names or defaults.DEFAULT_SIGNALS
        self._worker_group = WorkerGroup(spec)
        self._remaining_restarts = spec.max_restarts
        self._logs_specs = logs_specs
        self._health_check_server = health_check_server
        self._log_line_prefix_template = log_line_prefix_template
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

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:  # noqa: ARG002 -- torch's signature
        """Run until the workers have succeeded, or failed too often.

        Raises:
            SignalException: a signal asked to stop; the workers are stopped.
            RendezvousError: the rendezvous failed, or is closed.
            RuntimeError: the workers could not be started.
            ValueError: the machine's limits do not allow that many.
        """
        started = time.monotonic()
        job = self._job()
        if job.rendezvous is not None and self._worker_group.spec.rdzv_handler.is_closed():
            raise RendezvousClosedError(f"the rendezvous of job {job.run_id} is closed")
        _core.check_limits(job.nproc)
        signals = catch_signals(self._signals)
        if signals is None:
            warnings.warn("not in the main thread: signals are not handled", RuntimeWarning, stacklevel=2)
        console = Console()
        server = self._start_server(console)
        decisions = self._decisions(job, console)
        try:
            agent = Agent(
                job,
                self._workers(job),
                decisions,
                signals=signals,
                owns_process=False,
                console=console,
                observers=make_observers(job, self._observe(), console.say, server),
            )
            result = agent.run()
        finally:
            if signals is not None:
                signals.close()
            if self._health_check_server is not None:
                self._health_check_server.stop()
            self._total_execution_time = int(time.monotonic() - started)
        return self._run_result(result, getattr(decisions, "outcome", None))

    def _decisions(self, job: JobConfig, console: Console) -> Decisions:
        if job.rendezvous is None:
            return OneNode(job, _Planner(self._worker_group))
        from elasticrs.agent.several_nodes import SeveralNodes

        return SeveralNodes(
            job, console, self._planned, getattr(self._worker_group.spec.rdzv_handler, "home", None)
        )

    def _planned(self, plan: Plan, open_store: Callable[[], Store]) -> None:
        """Of several nodes: what the user's specification says about the workers' store has precedence."""
        spec = self._worker_group.spec
        if spec.master_addr is not None:
            plan.master_addr = spec.master_addr
        if spec.master_port is not None:
            # A port of the user's own is rank 0's to listen on.
            plan.master_port, plan.use_agent_store = spec.master_port, False
        self._worker_group.share(open_store)
        _update(self._worker_group, plan)

    def _job(self) -> JobConfig:
        spec = self._worker_group.spec
        # Where it is ours, the agent takes its settings and reacts to events, instead of asking it.
        rendezvous: Rendezvous | None = getattr(spec.rdzv_handler, "rendezvous", None)
        if rendezvous is not None:
            settings = rendezvous.settings.adapted(
                grace=self._shutdown_timeout, exit_barrier_timeout=self._exit_barrier_timeout
            )
            rendezvous = rendezvous.with_settings(settings)
        return JobConfig(
            spec.local_world_size,
            spec.rdzv_handler.get_run_id(),
            role=spec.role,
            name=spec.get_entrypoint_name(),
            max_restarts=spec.max_restarts,
            shutdown_timeout=self._shutdown_timeout,
            signals=self._signals,
            rendezvous=rendezvous,
            cpus=_cpus(spec),
            virtual_local_rank=spec.virtual_local_rank,
        )

    def _start_server(self, console: Console) -> OurServer | None:
        """Start the server; one of ours is opened, and this agent's loop answers."""
        if self._health_check_server is None:
            try:
                self._health_check_server = server_of_environment(os.environ)
                if self._health_check_server is not None:
                    self._health_check_server.open()
            except (OSError, ValueError) as error:
                self._health_check_server = None
                console.say(f"no health check server: {error}")
        server = self._health_check_server
        if isinstance(server, OurServer) and type(server).start is OurServer.start:
            server.open()
            return server
        if server is not None:
            server.start()
        return None

    def _observe(self) -> ObserveSettings:
        spec = self._worker_group.spec
        entry_point, backend = spec.get_entrypoint_name(), spec.rdzv_handler.get_backend()
        return ObserveSettings(spec.event_log_handler, entry_point, backend, has_metrics=True)

    def _workers(self, job: JobConfig) -> Workers:
        spec = self._worker_group.spec
        environ = hook_environment({**os.environ, "TORCHELASTIC_SIGNALS_TO_HANDLE": self._signal_names})
        template = self._log_line_prefix_template or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        filters = (spec.duplicate_stdout_filters or [], spec.duplicate_stderr_filters or [])
        setup = WorkerSetup(
            job, attempt_logs(self._logs_specs), template, environ, ignored_signals(), filters
        )
        if callable(spec.entrypoint):
            from elasticrs.multiprocessing.spawn import FunctionWorkers

            return FunctionWorkers(setup, spec.entrypoint, spec.args)
        command = [str(spec.entrypoint), *map(str, spec.args)]
        return CommandWorkers(setup, command)

    def _run_result(self, result: JobResult, outcome: Outcome | None) -> RunResult:
        group = self._worker_group
        if result.attempts:
            self._remaining_restarts = group.spec.max_restarts - result.attempts[-1].restarts
            _update(group, result.attempts[-1].plan)
        if result.phase is Phase.SUCCEEDED:
            group.state = WorkerState.SUCCEEDED
            return RunResult(WorkerState.SUCCEEDED, return_values=result.return_values)
        if result.signum is not None:
            import signal

            from elasticrs.multiprocessing.api import SignalException

            group.state = WorkerState.STOPPED
            sigval = signal.Signals(result.signum)
            raise SignalException(f"stopped by {sigval.name}", sigval)
        from elasticrs.agent.report import all_failures

        group.state = WorkerState.FAILED
        failed = all_failures(result)
        if not failed:
            if outcome is not None and outcome.kind not in {"failed", "stuck"}:
                from elasticrs.rendezvous.elastic.handler import error_of

                raise error_of(outcome)
            raise RuntimeError(result.message or "the workers could not be started")
        return RunResult(WorkerState.FAILED, failures=failed)


def _cpus(spec: WorkerSpec) -> list[list[int]] | None:
    options = spec.numa_options
    if options is None:
        return None
    from elasticrs.numa import cpus_by_local_rank

    try:
        # Torch's own options and modes serve as well.
        return cpus_by_local_rank(options.affinity_mode.value, spec.local_world_size, os.environ)
    except (ValueError, OSError) as error:
        if not options.should_fall_back_if_binding_fails:
            raise
        warnings.warn(f"workers are not bound to CPUs: {error}", RuntimeWarning, stacklevel=5)
        return None


class _Planner:
    """Plans from a user's rendezvous handler; keeps the worker group up to date."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def next(self, _supervisor: _core.Supervisor) -> Plan:
        group, spec = self._group, self._group.spec
        info = spec.rdzv_handler.next_rendezvous()
        if info.world_size != 1:
            raise RendezvousError(
                f"{info.world_size} nodes of a rendezvous that is not ours: LocalElasticAgent asks for one "
                "node only; a subclass of SimpleElasticAgent may have several"
            )
        reserved: ReservedPort | None = None
        store: _core.WorkerStore | None = None
        bootstrap = info.bootstrap_store_info
        address = spec.master_addr or (bootstrap.master_addr if bootstrap else "localhost")
        port = spec.master_port or (bootstrap.master_port if bootstrap else None)
        if isinstance(spec.rdzv_handler, OneNodeRendezvous):
            reserved, store = spec.rdzv_handler.reserved_port, spec.rdzv_handler.agent_store
        elif port is None:
            reserved = ReservedPort()
        if port is None:
            if reserved is None:
                raise RendezvousError("the rendezvous gave no port for the workers' store")
            port = reserved.number
        ranks = assign([NodeShare(spec.role, spec.local_world_size)], info.rank)
        group.store = info.store
        # A port of the user's own is rank 0's to listen on.
        use_agent_store = spec.rdzv_handler.use_agent_store and spec.master_port is None
        plan = Plan(ranks, address, port, reserved, store=store, use_agent_store=use_agent_store)
        _update(group, plan)
        return plan

    def close(self) -> None:
        """The launcher shuts the handler down: an agent may be run more than once."""


def _update(group: WorkerGroup, plan: Plan) -> None:
    """What users of torch's classes read from the worker group."""
    group.group_rank, group.group_world_size = plan.ranks[0].group_rank, plan.ranks[0].group_world_size
    group.master_addr, group.master_port = plan.master_addr, plan.master_port
    for worker, own in zip(group.workers, plan.ranks, strict=True):
        worker.global_rank, worker.role_rank = own.global_rank, own.role_rank
        worker.world_size, worker.role_world_size = own.world_size, own.role_world_size
