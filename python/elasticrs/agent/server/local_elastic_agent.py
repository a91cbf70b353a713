"""Torch's ``LocalElasticAgent``. The agent waits for events, or polls if a hook of torch was replaced."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from elasticrs._engine.gpus.numa import cpus_of_options
from elasticrs._engine.inside.run_path import run_script_path
from elasticrs._engine.job import config as defaults
from elasticrs._engine.job import phrases
from elasticrs._engine.job.config import JobSpec, LogSettings, MaxRestarts
from elasticrs._engine.process.console import Console
from elasticrs._engine.process.signals import catch_signals
from elasticrs._engine.supervise.decide.handler_nodes import HandlerNodes
from elasticrs._engine.supervise.failed_attempt import failures
from elasticrs._engine.supervise.observe import make_observers
from elasticrs._engine.supervise.observe.health_check_server import HealthCheckServer as OurServer
from elasticrs._engine.supervise.observe.health_check_server import (
    _AliveCallbackProxy,  # noqa: F401 -- torch exports it here
    server_of_environment,
)
from elasticrs._engine.supervise.observe.observer import Observer
from elasticrs._engine.supervise.run.worker_states import Sleepers
from elasticrs._engine.supervise.run_job import make_decisions, make_workers, run_job
from elasticrs._engine.supervise.state_machine import Phase
from elasticrs._engine.workers.functions.supervised_group import not_started
from elasticrs._engine.workers.logs import line_prefixes
from elasticrs._engine.workers.process import check_limits
from elasticrs.agent.server.polled_workers import GivenContext, PolledWorkers, raised_signals, start_by
from elasticrs.agent.server.simple_elastic_agent import (
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from elasticrs.events.api import fq_hostname
from elasticrs.metrics import prof
from elasticrs.multiprocessing import start_processes
from elasticrs.multiprocessing.api import SignalException
from elasticrs.multiprocessing.tail_log import TailLog, replaced_streams
from elasticrs.rendezvous.api import RendezvousClosedError
from elasticrs.rendezvous.registry import OneNodeRendezvous

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Protocol, TextIO

    from elasticrs._engine.job.config import Preload
    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
    from elasticrs._engine.supervise.attempt import Attempt, JobResult
    from elasticrs._engine.supervise.decide.decisions import Decisions
    from elasticrs._engine.supervise.run.loop import Agent
    from elasticrs.multiprocessing.api import LogsSpecs

    class HealthCheckServer(Protocol):
        """Interface of a health check server, as in torch."""

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
"""The original function. If a program has replaced it, torch's polling loop is used."""


class LocalElasticAgent(SimpleElasticAgent):
    """Agent that runs the workers of one node.

    The agent waits for events. If a subclass overrides a hook of torch, the agent runs torch's polling loop,
    which calls all hooks. Time-outs and signals that are ``None`` are read from environment variables.

    Args:
        spec: specification of the workers.
        logs_specs: destination of the workers' output.
        start_method: start method of functions: ``spawn``, ``fork`` or ``forkserver``.
        exit_barrier_timeout: seconds to wait for other nodes at the end; 300 by default.
        log_line_prefix_template: template of the prefix of tee'd lines.
        shutdown_timeout: seconds between the stop signal and SIGKILL; 30 by default.
        health_check_server: object with ``start`` (called before the workers) and ``stop`` (after them).
        uninterruptible_state_timeout: seconds that a worker may spend in uninterruptible sleep before the job
            fails. If 0 or negative, the state is not checked.
        signals_to_handle: names of signals; SIGTERM, SIGINT, SIGHUP and SIGQUIT by default.

    Raises:
        ValueError: an argument is not supported by this release, or a name is not a signal.
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
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        defaults.check_start_method(start_method)
        names = signals_to_handle or os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
        self._signal_names = names or defaults.DEFAULT_SIGNALS
        try:
            self._signals = defaults.parse_signals(self._signal_names)
        except ValueError as error:
            raise ValueError(f"signals_to_handle: expected {error}") from None
        # The fields of a `Mock(spec=WorkerSpec)` are mocks. A real `WorkerSpec` has validated its fields.
        forwarded = spec.signals_to_forward if isinstance(spec.signals_to_forward, str) else None
        self._given_forwarded = defaults.forwarded_by_name(forwarded, self._signals)
        if uninterruptible_state_timeout is None:
            uninterruptible_state_timeout = defaults.uninterruptible_state_timeout_from(os.environ)
        self._uninterruptible_state_timeout = uninterruptible_state_timeout
        if spec.on_failure == "replace" and (why := defaults.why_not_replaceable(start_method)):
            raise ValueError(f"on_failure: got 'replace', but {why}")
        self._start_method = start_method
        self._logs_specs = logs_specs
        self._log_line_prefix_template = log_line_prefix_template
        self._preload = _preloaded(spec, start_method)
        self._rdzv_handler = spec.rdzv_handler
        _name_command(spec)
        self._health_check_server = health_check_server
        self._given_barrier_timeout = exit_barrier_timeout
        self._sleepers = Sleepers(uninterruptible_state_timeout)
        self._pcontext: PolledWorkers | GivenContext | None = None
        self._loop: Agent | None = None

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run until the workers have succeeded, or have failed too often.

        Raises:
            SignalException: a signal asked the agent to stop. The workers have been stopped.
            RendezvousError: the rendezvous failed or is closed.
            RuntimeError: the workers could not be started. If a program does not exist or is not executable,
                this error is also a ``FileNotFoundError`` or ``PermissionError``.
            ValueError: the machine's limits are too low for the workers, or ``on_failure="replace"`` with a
                hook that was replaced, or with a rendezvous handler that is not from this package.
        """
        why = why_hooks_decide(self)
        if why is not None and self._worker_group.spec.on_failure == "replace":
            raise ValueError(
                f"on_failure: got 'replace', but {why}; in torch's loop, single workers cannot be replaced"
            )
        self._setup_healthcheck()
        try:
            if why is not None:
                _log.debug("the agent's hooks decide: %s", why)
                for name in _policy_without_effect(self._worker_group.spec):
                    _log.warning("%s has no effect, because %s", name, why)
                with raised_signals(self._signals, self._forwarded(), self._pass_on):
                    result: RunResult = super().run(role)
                    return result
            self._check_limits()
            return self._run_and_shut_down(self._run_by_events, is_observed=True)
        finally:
            pcontext, self._pcontext = self._pcontext, None
            if pcontext is not None:
                pcontext.release()
            if self._health_check_server is not None:
                self._health_check_server.stop()

    def _run_by_events(self) -> RunResult:
        group = self._worker_group
        handler: Any = group.spec.rdzv_handler
        job = self._job(self._rendezvous_settings())
        if job.make_handler is not None and job.on_failure == "replace":
            why = defaults.why_not_replaceable(back_end=f"rdzv_backend {job.rdzv_backend}")
            raise ValueError(f"on_failure: got 'replace', but {why}")
        if job.is_multi_node and handler.is_closed():
            raise RendezvousClosedError(f"the rendezvous of job {job.run_id} is closed")
        console = Console(log_prefix=job.log_prefix, is_one_of_several=job.has_peers)
        decisions = make_decisions(job, console)
        decisions.kept = getattr(handler, "kept", None)
        decisions.planned = lambda plan, open_store: group.take_plan(plan, open_store or handler.next_round())
        if isinstance(decisions, HandlerNodes):
            decisions.keeps_handler = True
        signals = catch_signals((*job.signals, *job.forwarded))
        if signals is None:
            # Do not issue a Python warning, because the program may turn warnings into errors.
            console.say("signals are not handled, because the job does not run in the main thread")

        def created(loop: Agent) -> None:
            self._loop = loop

        try:
            result = run_job(
                *(job, console, signals),
                owns_process=False,
                created=created,
                decisions=decisions,
                server=self._server_of_ours(),
                observers=_replaced_consoles(job),
                consoles=_own_consoles(),
            )
        finally:
            decisions.leave(signals)
            if signals is not None:
                signals.close()
        self._remaining_restarts = group.spec.max_restarts - result.restarts
        group.state = _STATES[result.phase]
        return _outcome(job, result, decisions)

    def _forwarded(self) -> tuple[int, ...]:
        """Return the signals that the agent passes on to the workers.

        By default, signals for which the program that runs the agent has a handler are left out.
        """
        if self._given_forwarded is not None:
            return self._given_forwarded
        found = defaults.forwarded_signals(None, self._signals)
        return tuple(signum for signum in found if signal.getsignal(signum) == signal.SIG_DFL)

    def _job(self, rendezvous: Rendezvous | None = None) -> JobSpec:
        """Return the specification of the job.

        ``rendezvous`` has the settings with which the event loop itself takes part in the rendezvous. It is
        ``None`` for a single node, and if the loop must call the methods of the rendezvous handler instead.
        """
        spec = self._worker_group.spec
        # Compare the exact type, because a subclass of the user may have overridden methods of the handler.
        alone = spec.rdzv_handler if type(spec.rdzv_handler) is OneNodeRendezvous else None
        calls_handler = rendezvous is None and alone is None
        template = self._log_line_prefix_template or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        function, command = spec.entrypoint, (spec.entrypoint, *spec.args)
        return JobSpec.taken_from(
            spec,
            nproc=spec.local_world_size,
            run_id=spec.rdzv_handler.get_run_id(),
            command=command if callable(function) else [str(word) for word in command],
            start_method=self._start_method,
            variables={"TORCHELASTIC_SIGNALS_TO_HANDLE": self._signal_names},
            logs=LogSettings(
                logs_specs=self._logs_specs,
                log_line_prefix_template=template,
                duplicate_stdout_filters=spec.duplicate_stdout_filters or (),
                duplicate_stderr_filters=spec.duplicate_stderr_filters or (),
            ),
            name=spec.get_entrypoint_name(),
            shutdown_timeout=self._shutdown_timeout,
            signals=self._signals,
            forwarded=self._forwarded(),
            stop_scope=spec.stop_scope or defaults.default_stop_scope(function),
            rendezvous=rendezvous,
            make_handler=(lambda: spec.rdzv_handler) if calls_handler else None,
            exit_barrier_timeout=self._exit_barrier_timeout,
            rdzv_backend=spec.rdzv_handler.get_backend(),
            master_addr="localhost" if alone is None else alone.address,
            master_port=None if alone is None else alone.port,
            has_metrics=True,
            cpus=cpus_of_options(spec.numa_options, spec.local_world_size),
            uninterruptible_state_timeout=self._uninterruptible_state_timeout,
            preload=self._preload,
        )

    def request_checkpoint(self) -> None:
        """Request a checkpoint from all workers of the job, which must use :func:`elasticrs.train.train`.

        All workers save at the end of the same step, usually the second step from now. The agent then prints
        the outcome. A request stays pending if a worker fails. This method can be called from any thread. It
        is not available in torch.

        Raises:
            RuntimeError: no running worker can receive the request. ``on_failure="replace"`` is needed.
        """
        checkpoints = None if self._loop is None else self._loop.checkpoints
        if checkpoints is None:
            raise RuntimeError('no workers can save a checkpoint on request: this needs on_failure="replace"')
        checkpoints.ask()

    def _pass_on(self, signum: int) -> None:
        # A user-supplied `PContext` cannot pass the signal on to the workers.
        if isinstance(self._pcontext, PolledWorkers):
            self._pcontext.pass_on(signum)

    def _check_limits(self) -> None:
        spec = self._worker_group.spec
        check_limits(spec.local_world_size, spec.hang_timeout, os.environ)

    def _rendezvous_settings(self) -> Rendezvous | None:
        """Return the settings with which the event loop itself can take part in the rendezvous.

        Return ``None`` if the rendezvous handler is not of this package, because the loop must then call it.
        """
        handler = self._worker_group.spec.rdzv_handler
        is_ours = type(handler).__module__.partition(".")[0] == __name__.partition(".")[0]
        rendezvous: Rendezvous | None = getattr(handler, "rendezvous", None) if is_ours else None
        if rendezvous is None:
            return None
        settings = rendezvous.settings.adapted(
            grace=self._shutdown_timeout, exit_barrier_timeout=self._given_barrier_timeout
        )
        return rendezvous.replaced(settings=settings)

    def _setup_healthcheck(self) -> None:
        """Start the health check server once. Torch calls this hook before every start of workers."""
        if self._health_check_server is None:
            try:
                made = server_of_environment(os.environ, self._get_alive_time)
                if made is not None:
                    made.open()
                    self._health_check_server = made
            except (OSError, ValueError) as error:
                Console(log_prefix=self._worker_group.spec.log_prefix).say(f"no health check server: {error}")
        ours = self._server_of_ours()
        if ours is not None and why_hooks_decide(self) is None:
            ours.open()
        elif self._health_check_server is not None:
            if ours is not None:
                ours.find_overdue = self._progress.overdue
            self._health_check_server.start()

    @staticmethod
    def _get_current_time_secs() -> int:
        return int(time.time())

    def _get_fq_hostname(self) -> str:
        return fq_hostname()

    def _server_of_ours(self) -> OurServer | None:
        server = self._health_check_server
        is_ours = isinstance(server, OurServer) and type(server).start is OurServer.start
        return server if isinstance(server, OurServer) and is_ours else None

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        self._check_limits()
        result: RunResult = super()._invoke_run(role)
        attempt = self._pcontext.attempt if self._pcontext is not None else None
        if result.is_failed() and not result.failures and attempt is not None:
            # No worker caused the failure. Report the workers that failed as a consequence.
            result.failures = failures(attempt)
        return result

    def _tell_restart(self, state: WorkerState) -> None:
        left, workers = self._remaining_restarts, self._pcontext
        if not (isinstance(workers, PolledWorkers) and workers.announce(left)):
            super()._tell_restart(state)

    @prof
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec, job = worker_group.spec, self._job()
        restarts = spec.max_restarts - self._remaining_restarts
        if start_processes is not _OWN_START:
            self._pcontext = start_by(start_processes, spec, job, worker_group.plan(), restarts)
            pids: dict[int, Any] = self._pcontext.pids()
            return pids
        if self._pcontext is None:
            console = Console(log_prefix=job.log_prefix)
            observers = make_observers(job, console.say, self._server_of_ours(), has_hooks=True)
            self._pcontext = PolledWorkers(
                job, make_workers(job, _own_consoles()), console, [*observers, *_replaced_consoles(job)]
            )
        return self._pcontext.start(worker_group.plan(), restarts)

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
        # After a failure, wait until all workers have stopped, because the result contains the exit codes of
        # all.
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
        # Allow no restart, because a process in uninterruptible sleep may hold kernel resources.
        self._remaining_restarts = 0
        _log.error("%s; no restart follows", phrases.asleep(overdue, self._uninterruptible_state_timeout))
        return RunResult(WorkerState.UNHEALTHY)


def _replaced_consoles(job: JobSpec) -> Sequence[Observer]:
    """Return an observer that prints workers' output to the program's standard streams that were replaced."""
    streams = replaced_streams()
    return [_ReplacedConsole(streams, job.role, job.logs.log_line_prefix_template)] if streams else []


def _own_consoles() -> set[int]:
    """Return the descriptors (1, 2) of those standard streams that the program has not replaced."""
    return {1, 2} - replaced_streams().keys()


def _preloaded(spec: WorkerSpec, start_method: str) -> Preload | None:
    # If ``spec`` is a mock, its field ``warm`` is a mock, too, and no string.
    if not isinstance(spec.warm, str) or spec.warm == "off":
        return None
    from elasticrs._engine.workers.warm import modules as warm

    if callable(spec.entrypoint):
        entry = warm.entry_of_function(spec.entrypoint, spec.args, start_method)
    else:
        entry = warm.entry_of_command([str(spec.entrypoint), *map(str, spec.args)])
    try:
        return warm.preload(spec.warm, entry)
    except defaults.UsageError as error:
        raise ValueError(f"warm: got {spec.warm!r}, but {error}") from None


class _ReplacedConsole(Observer):
    """Copies the workers' console output to the objects that replace ``sys.stdout`` and ``sys.stderr``."""

    def __init__(self, streams: Mapping[int, TextIO], role: str, template: str | None) -> None:
        self._streams = streams
        self._role = role
        self._template = template
        self._tails: list[TailLog] = []

    def prepared(self, attempt: Attempt) -> None:
        self._stop()
        paths = attempt.paths
        prefixes = line_prefixes(self._template, attempt.plan.ranks)
        for fd, stream in self._streams.items():
            tees = paths.tee_stdouts if fd == 1 else paths.tee_stderrs
            files = {rank: path for rank, path in tees.items() if path != os.devnull}
            self._tails.append(TailLog(self._role, files, stream, prefixes).start())

    def over(self, attempt: Attempt, outcome: str) -> None:  # noqa: ARG002 -- the base class's signature
        self._stop()

    def ended(self, result: JobResult, error: BaseException | None) -> None:  # noqa: ARG002 -- as above
        self._stop()

    def _stop(self) -> None:
        while self._tails:
            self._tails.pop().stop()


def _outcome(job: JobSpec, result: JobResult, decisions: Decisions) -> RunResult:
    """Convert a job's result to torch's type. Raise if a signal ended the job, or no worker has run."""
    if result.phase is Phase.SUCCEEDED:
        return RunResult(WorkerState.SUCCEEDED, return_values=result.return_values)
    if result.signum is not None:
        sigval = signal.Signals(result.signum)
        raise SignalException(f"stopped by {sigval.name}", sigval)
    if isinstance(decisions, HandlerNodes) and decisions.error is not None:
        raise decisions.error
    from elasticrs._engine.failures.failure import root_cause
    from elasticrs._engine.supervise.observe.job_report import all_failures, exit_code

    failed = all_failures(result)
    code = exit_code(defaults.ExitCodes.parse(job.exit_codes), result, failed)
    if failed:
        root = failed[root_cause(failed)]
        if result.message not in (None, root.cause_outside):
            root.more_notes = [*root.more_notes, result.message]
        return RunResult(
            WorkerState.FAILED,
            failures=failed,
            verdict=result.verdict.value,
            exit_code=code,
            reason=result.message,
        )
    of_nodes = getattr(decisions, "outcome", None)
    if of_nodes is not None and of_nodes.kind not in {"failed", "stuck", "excluded"}:
        from elasticrs.rendezvous.elastic_handler import error_of

        raise error_of(of_nodes)
    error = not_started(result.message or "the workers could not be started", result.start_errno)
    error.verdict, error.exit_code, error.reason = result.verdict.value, code, result.message
    raise error


_STATES = {
    Phase.SUCCEEDED: WorkerState.SUCCEEDED,
    Phase.FAILED: WorkerState.FAILED,
    Phase.STOPPED: WorkerState.STOPPED,
}

_HOOKS = (
    *("_assign_worker_ranks", "_construct_event", "_exit_barrier", "_get_worker_state"),
    *("_initialize_workers", "_invoke_run", "_monitor_workers", "_record_flakiness_metric"),
    *("_record_metric_with_condition", "_record_metrics", "_record_worker_events", "_rendezvous"),
    *("_restart_workers", "_shutdown", "_start_workers", "_stop_workers", "record_duration"),
)
_OWN_HOOKS = {name: getattr(LocalElasticAgent, name) for name in _HOOKS}
"""Original hooks.

They are compared with the current ones, because a user may have replaced a hook in a subclass, the class or
an object.
"""


def _name_command(spec: WorkerSpec) -> None:
    """Pass the workers' command to the rendezvous, because all nodes have to run the same command."""
    handler: Any = spec.rdzv_handler
    if spec.entrypoint is None or not hasattr(handler, "rendezvous"):
        return
    from elasticrs._engine.nodes.protocol import rendezvous as nodes

    rendezvous = handler.rendezvous
    # A handler of another package may have an unrelated attribute `rendezvous`.
    if not isinstance(rendezvous, nodes.Rendezvous):
        return

    arguments = [str(each) for each in spec.args]
    if spec.entrypoint is run_script_path and arguments:
        command = nodes.command_of_file(arguments[0], arguments[1:])
    elif callable(spec.entrypoint):
        command = nodes.command_of_function(spec.entrypoint)
    elif spec.entrypoint in {sys.executable, os.environ.get("PYTHON_EXEC")}:
        command = nodes.command_of_python(arguments)
    else:
        command = nodes.command_of_program(spec.entrypoint, arguments)
    handler.rendezvous = rendezvous.replaced(command=command)


def _policy_without_effect(spec: WorkerSpec) -> list[str]:
    """Return the names of settings that the user has changed from their default, but that torch's polling
    loop ignores.
    """
    names = (
        *("restart_delay", "max_same_failures", "fatal_exit_codes", "exit_codes", "max_excluded_nodes"),
        *("keep", "keep_memory", "keep_peers", "keep_bandwidth", "keep_save"),
    )
    found = [
        name
        for name in names
        # The fields of a mock specification are mocks.
        if isinstance(value := getattr(spec, name, None), (str, int))
        and value != getattr(defaults.WorkerSettings, name)
    ]
    if isinstance(spec.max_restarts, MaxRestarts) and spec.max_restarts.window is not None:
        found.append("the duration in max_restarts")
    return found


def why_hooks_decide(agent: LocalElasticAgent) -> str | None:
    """Return why the agent must use torch's polling loop; ``None`` if it can use the event-driven loop.

    Only the polling loop calls the agent's hooks (methods that users may replace). It is needed if the user
    has replaced one: in a subclass, in the class itself, or in an object.
    """
    if start_processes is not _OWN_START:
        return "start_processes was replaced"
    for name, hook in _OWN_HOOKS.items():
        if getattr(getattr(agent, name), "__func__", None) is not hook:
            return f"{name} was replaced"
    return None
