"""The agent that runs functions or programs on this node and waits for events instead of polling.

It takes torch's :class:`~elasticrs.agent.server.WorkerSpec` and runs the same loop as the command line.
"""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from typing import TYPE_CHECKING, Any

from elasticrs import _core, options, texts
from elasticrs import config as defaults
from elasticrs._worker import hook_environment, inherited_environment
from elasticrs.agent.decisions import OneNode
from elasticrs.agent.health_check_server import HealthCheckServer as OurServer
from elasticrs.agent.health_check_server import (
    _AliveCallbackProxy,  # noqa: F401 -- here in torch
    server_of_environment,
)
from elasticrs.agent.loop import Agent
from elasticrs.agent.observer_factory import make_observers, make_observers_of_hooks
from elasticrs.agent.signals import catch_signals, ignored_signals
from elasticrs.agent.sleepers import Sleepers
from elasticrs.agent.state import Phase
from elasticrs.compat.given_context import GivenContext, start_by
from elasticrs.compat.polled_workers import PolledWorkers
from elasticrs.compat.raised_signals import raised_signals
from elasticrs.compat.replaced_console import ReplacedConsole
from elasticrs.compat.simple_elastic_agent import (
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from elasticrs.config import JobConfig, ObserveSettings
from elasticrs.console import Console, prefix_of
from elasticrs.events.hostname import fq_hostname
from elasticrs.metrics import prof
from elasticrs.multiprocessing import start_processes
from elasticrs.multiprocessing.api import SignalException
from elasticrs.multiprocessing.binding import cpus_of_options
from elasticrs.multiprocessing.not_started import not_started
from elasticrs.multiprocessing.plugins import attempt_logs
from elasticrs.multiprocessing.tail_log import replaced_streams
from elasticrs.plan import Plan
from elasticrs.ports import ReservedPort
from elasticrs.ranks import NodeShare, WorkerRanks, assign
from elasticrs.rendezvous.api import RendezvousClosedError, RendezvousError
from elasticrs.rendezvous.static import OneNodeRendezvous
from elasticrs.workers import CommandWorkers, Workers, WorkerSetup, watching_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol

    from elasticrs.agent.attempt import JobResult
    from elasticrs.agent.decisions import Decisions
    from elasticrs.agent.observer import Observer
    from elasticrs.multiprocessing.api import LogsSpecs
    from elasticrs.multiprocessing.errors import ProcessFailure
    from elasticrs.rendezvous.elastic.messages import Outcome
    from elasticrs.rendezvous.elastic.settings import Rendezvous
    from elasticrs.store import Store

    class HealthCheckServer(Protocol):
        """What torch calls a health check server."""

        def start(self) -> None: ...

        def stop(self) -> None: ...


__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
    "LocalElasticAgent",
]

TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
TORCHELASTIC_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT = defaults.UNINTERRUPTIBLE_STATE_VARIABLE

_log = logging.getLogger("elasticrs.agent")

_OWN_START = start_processes
"""What starts the workers in torch's loop where programs have put a function of theirs in its place."""


class LocalElasticAgent(SimpleElasticAgent):
    """Runs the workers of one node.

    It waits for events, as the command line does. A subclass that overrides one of torch's hooks, and a
    rendezvous handler that is not ours, get torch's loop instead (:class:`SimpleElasticAgent`), which calls
    all hooks, over the same workers.

    Args:
        spec: the workers.
        logs_specs: where their output goes.
        start_method: for functions: ``spawn``, ``fork`` or ``forkserver``.
        exit_barrier_timeout: seconds to wait for other nodes at the end; from the environment or 300 when
            ``None``.
        log_line_prefix_template: before tee'd lines.
        shutdown_timeout: seconds between the signal and SIGKILL; from the environment or 30 when ``None``.
        health_check_server: started before the workers and stopped after them: anything with ``start`` and
            ``stop``.
        uninterruptible_state_timeout: seconds that a worker may spend in uninterruptible sleep before the job
            fails; from ``TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT`` when ``None``; not looked at when 0 or
            negative.
        signals_to_handle: names; from ``TORCHELASTIC_SIGNALS_TO_HANDLE``, or the usual four, when ``None``.
        signals_to_forward: see :class:`elasticrs.launcher.LaunchConfig`, as for the next one.
        stop_scope: whom a stop signals first.

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
        signals_to_forward: str | None = None,
        stop_scope: str | None = None,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        if start_method not in defaults.START_METHODS:
            raise ValueError(
                f"start_method: got {start_method!r}, expected one of {', '.join(defaults.START_METHODS)}"
            )
        names = signals_to_handle or os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
        try:
            self._signals = defaults.parse_signals(names or defaults.DEFAULT_SIGNALS)
        except ValueError as error:
            raise ValueError(f"signals_to_handle: expected {error}") from None
        self._signal_names = names or defaults.DEFAULT_SIGNALS
        self._forwarded = defaults.forwarded_by_name(signals_to_forward, self._signals)
        options.check(stop_scope=stop_scope)
        self._stop_scope = stop_scope or defaults.default_stop_scope(spec.entrypoint)
        self._start_method = start_method
        self._rdzv_handler = spec.rdzv_handler
        self._logs_specs = logs_specs
        self._health_check_server = health_check_server
        self._log_line_prefix_template = log_line_prefix_template
        self._given_barrier_timeout = exit_barrier_timeout
        self._uninterruptible_state_timeout = (
            defaults.uninterruptible_state_timeout_from(os.environ)
            if uninterruptible_state_timeout is None
            else uninterruptible_state_timeout
        )
        self._sleepers = Sleepers(self._uninterruptible_state_timeout)
        self._pcontext: PolledWorkers | GivenContext | None = None

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run until the workers have succeeded, or failed too often.

        Raises:
            SignalException: a signal asked to stop; the workers are stopped.
            RendezvousError: the rendezvous failed, or is closed.
            RuntimeError: the workers could not be started; for a program that is not there or may not be run
                also a ``FileNotFoundError`` or ``PermissionError``.
            ValueError: the machine's limits do not allow that many.
        """
        self._setup_healthcheck()
        try:
            if self._waits_for_events:
                # Measured by who observes the loop.
                return self._run_and_shut_down(role)
            with raised_signals(
                self._signals, SignalException, self._interrupt, self._forwards(), self._pass_on
            ):
                result: RunResult = super().run(role)
                return result
        finally:
            pcontext, self._pcontext = self._pcontext, None
            if pcontext is not None:
                pcontext.release()
            if self._health_check_server is not None:
                self._health_check_server.stop()

    def _interrupt(self, error: BaseException) -> bool:
        return self._pcontext is not None and self._pcontext.interrupt(error)

    def _forwards(self) -> tuple[int, ...]:
        """The signals to pass on; by default not those for which the program has handlers."""
        if self._forwarded is not None:
            return self._forwarded
        found = defaults.forwarded_signals(None, self._signals)
        return tuple(signum for signum in found if signal.getsignal(signum) == signal.SIG_DFL)

    def _pass_on(self, signum: int) -> None:
        if self._pcontext is not None:
            self._pcontext.pass_on(signum)

    @property
    def _waits_for_events(self) -> bool:
        """Whether nobody else has a say: neither a subclass nor a handler of the user's."""
        handler = self._worker_group.spec.rdzv_handler
        # One of ours over a back end of the user's has no settings of a rendezvous.
        meets = isinstance(handler, OneNodeRendezvous) or getattr(handler, "rendezvous", None) is not None
        is_ours = type(handler).__module__.partition(".")[0] == __name__.partition(".")[0]
        own = all(getattr(getattr(self, name), "__func__", None) is hook for name, hook in _OWN_HOOKS.items())
        return own and meets and is_ours and start_processes is _OWN_START

    # --- the loop that waits ---

    def _record_metrics(self, group_results: RunResult) -> None:
        if not self._waits_for_events:
            # The loop that waits is observed: see :mod:`elasticrs.agent.job_metrics`.
            super()._record_metrics(group_results)

    def _record_worker_events(self, result: RunResult) -> None:
        if not self._waits_for_events:
            super()._record_worker_events(result)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        spec = self._worker_group.spec
        nproc = spec.local_world_size
        _core.check_limits(nproc, others=watching_descriptors(nproc, spec.hang_timeout, os.environ))
        if self._waits_for_events:
            return self._follow_events()
        result: RunResult = super()._invoke_run(role)
        if result.is_failed() and not result.failures:
            # It was not a worker that failed first; what there is to know of them is told all the same.
            result.failures = self._failures()
        return result

    def _follow_events(self) -> RunResult:
        job = self._job(self._rendezvous_settings())
        if job.rendezvous is not None and self._worker_group.spec.rdzv_handler.is_closed():
            raise RendezvousClosedError(f"the rendezvous of job {job.run_id} is closed")
        signals = catch_signals((*self._signals, *job.forwarded))
        if signals is None:
            warnings.warn("not in the main thread: signals are not handled", RuntimeWarning, stacklevel=5)
        console = Console(prefix=prefix_of(job.rendezvous is not None))
        server = self._server_of_the_loop()
        decisions = self._decisions(job, console)
        try:
            observers = make_observers(job, self._observe(), console.say, server, tells_end=False)
            agent = Agent(
                job,
                self._workers(job),
                decisions,
                signals=signals,
                owns_process=False,
                console=console,
                observers=self._with_console(observers),
            )
            result = agent.run()
        finally:
            if signals is not None:
                signals.close()
        return self._run_result(result, getattr(decisions, "outcome", None))

    def _decisions(self, job: JobConfig, console: Console) -> Decisions:
        if job.rendezvous is None:
            handler = self._worker_group.spec.rdzv_handler
            if not isinstance(handler, OneNodeRendezvous):
                raise TypeError(f"{type(handler).__name__} has no settings of a rendezvous")
            return OneNode(job, _Planner(self._worker_group, handler))
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

    def _rendezvous_settings(self) -> Rendezvous | None:
        """Where it is ours, the agent takes its settings and reacts to events, instead of asking it."""
        rendezvous: Rendezvous | None = getattr(self._worker_group.spec.rdzv_handler, "rendezvous", None)
        if rendezvous is None:
            return None
        settings = rendezvous.settings.adapted(
            grace=self._shutdown_timeout, exit_barrier_timeout=self._given_barrier_timeout
        )
        return rendezvous.replaced(settings=settings)

    def _job(self, rendezvous: Rendezvous | None = None) -> JobConfig:
        spec = self._worker_group.spec
        return JobConfig(
            spec.local_world_size,
            spec.rdzv_handler.get_run_id(),
            role=spec.role,
            name=spec.get_entrypoint_name(),
            max_restarts=spec.max_restarts,
            shutdown_timeout=self._shutdown_timeout,
            signals=self._signals,
            forwarded=self._forwards(),
            stop_scope=self._stop_scope,
            rendezvous=rendezvous,
            cpus=cpus_of_options(spec.numa_options, spec.local_world_size),
            virtual_local_rank=spec.virtual_local_rank,
            uninterruptible_state_timeout=self._uninterruptible_state_timeout,
            hang_timeout=spec.hang_timeout,
            hang_startup_timeout=spec.hang_startup_timeout,
            exit_timeout=spec.exit_timeout,
        )

    def _setup_healthcheck(self) -> None:
        """Start the health check server of the caller, or what ``TORCHELASTIC_HEALTH_CHECK_PORT`` asks for.

        Called once, before the first rendezvous; torch calls it before each start of workers.
        """
        if self._health_check_server is None:
            try:
                made = server_of_environment(os.environ, self._get_alive_time)
                if made is not None:
                    made.open()
                    self._health_check_server = made
            except (OSError, ValueError) as error:
                Console().say(f"no health check server: {error}")
        server = self._server_of_the_loop()
        if server is not None:
            server.open()
        elif self._health_check_server is not None:
            ours = self._server_of_ours()
            if ours is not None:
                ours.attend_to(self._progress.overdue)
            self._health_check_server.start()

    @staticmethod
    def _get_current_time_secs() -> int:
        return int(time.time())

    def _get_fq_hostname(self) -> str:
        return fq_hostname()

    def _server_of_the_loop(self) -> OurServer | None:
        """The server, where the loop that waits answers for it; another one has its own ways."""
        return self._server_of_ours() if self._waits_for_events else None

    def _server_of_ours(self) -> OurServer | None:
        server = self._health_check_server
        is_ours = isinstance(server, OurServer) and type(server).start is OurServer.start
        return server if isinstance(server, OurServer) and is_ours else None

    def _observe(self) -> ObserveSettings:
        spec = self._worker_group.spec
        entry_point, backend = spec.get_entrypoint_name(), spec.rdzv_handler.get_backend()
        return ObserveSettings(spec.event_log_handler, entry_point, backend, has_metrics=True)

    def _with_console(self, observers: Sequence[Observer]) -> Sequence[Observer]:
        """With who shows lines of workers where ``sys.stdout`` or ``sys.stderr`` was replaced."""
        streams = replaced_streams()
        if not streams:
            return observers
        role = self._worker_group.spec.role
        return [*observers, ReplacedConsole(streams, role, self._prefix_template())]

    def _workers(self, job: JobConfig) -> Workers:
        spec = self._worker_group.spec
        environ = hook_environment(
            {**inherited_environment(), "TORCHELASTIC_SIGNALS_TO_HANDLE": self._signal_names}
        )
        filters = (spec.duplicate_stdout_filters or [], spec.duplicate_stderr_filters or [])
        setup = WorkerSetup(
            *(job, attempt_logs(self._logs_specs), self._prefix_template(), environ),
            *(ignored_signals(), filters, {1, 2} - replaced_streams().keys()),
        )
        if callable(spec.entrypoint):
            from elasticrs.multiprocessing.function_workers import function_workers

            return function_workers(setup, spec.entrypoint, spec.args, self._start_method)
        command = [str(spec.entrypoint), *map(str, spec.args)]
        return CommandWorkers(setup, command)

    def _prefix_template(self) -> str | None:
        return self._log_line_prefix_template or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")

    def _run_result(self, result: JobResult, outcome: Outcome | None) -> RunResult:
        group = self._worker_group
        if result.attempts:
            self._remaining_restarts = group.spec.max_restarts - result.attempts[-1].restarts
            _update(group, result.attempts[-1].plan)
        if result.phase is Phase.SUCCEEDED:
            group.state = WorkerState.SUCCEEDED
            return RunResult(WorkerState.SUCCEEDED, return_values=result.return_values)
        if result.signum is not None:
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
            raise not_started(result.message or "the workers could not be started", result.start_errno)
        return RunResult(WorkerState.FAILED, failures=failed)

    # --- torch's hooks, for the loop that looks ---

    @prof
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        restarts = spec.max_restarts - self._remaining_restarts
        if start_processes is not _OWN_START:
            self._pcontext = start_by(
                start_processes,
                spec,
                _plan_of(worker_group),
                restarts,
                logs_specs=self._logs_specs,
                start_method=self._start_method,
                prefix_template=self._prefix_template(),
            )
            pids: dict[int, Any] = self._pcontext.pids()
            return pids
        if self._pcontext is None:
            job = self._job()
            console = Console()
            server = self._server_of_ours()
            observers = make_observers_of_hooks(job, self._observe(), console.say, server)
            self._pcontext = PolledWorkers(job, self._workers(job), console, self._with_console(observers))
        return self._pcontext.start(_plan_of(worker_group), restarts)

    @prof
    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 -- torch's signature
        self._shutdown(timeout=self._shutdown_timeout)

    @prof
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        pcontext = self._pcontext
        if pcontext is None:
            raise RuntimeError("no workers were started")
        ids = {worker.id for worker in worker_group.workers}
        if ids != set(pcontext.pids().values()):
            _log.error(
                "the worker ids %s are not those of the processes that were started: %s", ids, pcontext.pids()
            )
            return RunResult(WorkerState.UNKNOWN)
        # After the first failure the others are being stopped: how they end belongs to the result.
        with self._progress.within("_monitor_workers", self._shutdown_timeout if pcontext.has_failed else 0):
            found = pcontext.wait(-1 if pcontext.has_failed else 0)
        if found is None:
            return self._check_sleepers(pcontext)
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        if found.is_failed():
            failures = {ranks[local]: failure for local, failure in found.failures.items()}
            return RunResult(WorkerState.FAILED, failures=failures)
        values = {ranks[local]: value for local, value in found.return_values.items()}
        return RunResult(WorkerState.SUCCEEDED, return_values=values)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        if self._pcontext is not None:
            self._pcontext.close(death_sig, timeout)

    def _pause(self, seconds: float) -> None:
        if self._pcontext is None:
            super()._pause(seconds)
        else:
            self._pcontext.wait_for_news(seconds)

    def _check_sleepers(self, pcontext: PolledWorkers | GivenContext) -> RunResult:
        overdue = self._sleepers.look(pcontext.pids())
        if not overdue:
            return RunResult(WorkerState.HEALTHY)
        # What such a process holds in the kernel is in the way of its successor.
        self._remaining_restarts = 0
        _log.error("%s; no restart follows", texts.asleep(overdue, self._uninterruptible_state_timeout))
        return RunResult(WorkerState.UNHEALTHY)

    def _failures(self) -> dict[int, ProcessFailure]:
        attempt = self._pcontext.attempt if self._pcontext is not None else None
        if attempt is None:
            return {}
        from elasticrs.agent.report import failures

        return failures(attempt)


_HOOKS = (
    "_assign_worker_ranks",
    "_construct_event",
    "_exit_barrier",
    "_get_worker_state",
    "_initialize_workers",
    "_invoke_run",
    "_monitor_workers",
    "_record_flakiness_metric",
    "_record_metric_with_condition",
    "_record_metrics",
    "_record_worker_events",
    "_rendezvous",
    "_restart_workers",
    "_shutdown",
    "_start_workers",
    "_stop_workers",
    "record_duration",
)
_OWN_HOOKS = {name: getattr(LocalElasticAgent, name) for name in _HOOKS}
"""As they are before anybody replaces one, in a subclass, in the class or in an object."""


def _plan_of(group: WorkerGroup) -> Plan:
    """What the hooks have agreed on."""
    spec = group.spec
    if group.group_rank is None or group.group_world_size is None:
        raise RuntimeError("workers are started before a rendezvous")
    ranks = [
        WorkerRanks(
            spec.role,
            worker.local_rank,
            worker.global_rank,
            group.group_rank,
            worker.role_rank,
            spec.local_world_size,
            worker.world_size,
            group.group_world_size,
            worker.role_world_size,
        )
        for worker in group.workers
    ]
    reserved = None
    if group.master_port is None:
        if group.group_world_size > 1:
            raise RendezvousError("the rendezvous gave no port for the workers' store")
        reserved = ReservedPort()
        group.master_port = reserved.number
    # A port of the user's own is rank 0's to listen on.
    use_agent_store = spec.rdzv_handler.use_agent_store and spec.master_port is None
    address = group.master_addr or "localhost"
    return Plan(ranks, address, group.master_port, reserved, use_agent_store=use_agent_store)


class _Planner:
    """Plans from the handler of a node by itself; keeps the worker group up to date."""

    def __init__(self, group: WorkerGroup, handler: OneNodeRendezvous) -> None:
        self._group = group
        self._handler = handler

    def next(self, supervisor: _core.Supervisor) -> Plan:
        group, spec, handler = self._group, self._group.spec, self._handler
        bootstrap = handler.next_served_by(supervisor)
        plan = Plan(
            assign([NodeShare(spec.role, spec.local_world_size)], 0),
            spec.master_addr or bootstrap.master_addr,
            spec.master_port or bootstrap.master_port,
            handler.reserved_port,
            store=handler.agent_store,
            # A port of the user's own is rank 0's to listen on.
            use_agent_store=handler.use_agent_store and spec.master_port is None,
        )
        group.share(handler.open_shared_store)
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
