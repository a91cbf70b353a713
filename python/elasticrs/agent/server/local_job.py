"""Run the job of torch's agent class with :func:`.run_job`, like a job of the command line."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from elasticrs._engine.gpus.numa import cpus_of_options
from elasticrs._engine.job import config as defaults
from elasticrs._engine.job.config import JobSpec, LogSettings, Preload
from elasticrs._engine.supervise.attempts.state_machine import Phase
from elasticrs._engine.supervise.decide.handler_nodes import HandlerNodes
from elasticrs._engine.supervise.observe.observer import Observer
from elasticrs._engine.workers.functions.supervised_group import not_started
from elasticrs._engine.workers.logs import line_prefixes
from elasticrs.agent.server.worker_group import RunResult, WorkerState
from elasticrs.multiprocessing.api import SignalException
from elasticrs.multiprocessing.tail_log import TailLog, replaced_streams
from elasticrs.rendezvous.one_node_handler import OneNodeRendezvous

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TextIO

    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
    from elasticrs._engine.supervise.attempts.attempt import Attempt, JobResult
    from elasticrs._engine.supervise.decide.decisions import Decisions
    from elasticrs._engine.workers.warm.modules import Entry
    from elasticrs.agent.server.worker_group import WorkerSpec
    from elasticrs.multiprocessing.api import LogsSpecs


class LocalJob:
    """Settings of one agent's job. See :class:`~elasticrs.agent.server.LocalElasticAgent` for arguments."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        start_method: str,
        prefix_template: str | None,
        shutdown_timeout: float,
        uninterruptible_state_timeout: float | None,
        exit_barrier_timeout: float,
        signals_to_handle: str | None,
    ) -> None:
        defaults.check_start_method(start_method)
        names = signals_to_handle or os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
        self._signal_names = names or defaults.DEFAULT_SIGNALS
        try:
            self.signals = defaults.parse_signals(self._signal_names)
        except ValueError as error:
            raise ValueError(f"signals_to_handle: expected {error}") from None
        # The fields of a `Mock(spec=WorkerSpec)` are mocks. A real `WorkerSpec` has validated its fields.
        forwarded = spec.signals_to_forward if isinstance(spec.signals_to_forward, str) else None
        self._forwarded = defaults.forwarded_by_name(forwarded, self.signals)
        if uninterruptible_state_timeout is None:
            uninterruptible_state_timeout = defaults.uninterruptible_state_timeout_from(os.environ)
        self.uninterruptible_state_timeout = uninterruptible_state_timeout
        self.start_method = start_method
        self.logs_specs = logs_specs
        self._spec = spec
        if spec.on_failure == "replace" and (why := defaults.why_not_replaceable(start_method)):
            raise ValueError(f"on_failure: got 'replace', but {why}")
        self._preload = _preload(spec, start_method)
        self._shutdown_timeout = shutdown_timeout
        self._exit_barrier_timeout = exit_barrier_timeout
        self._prefix_template = prefix_template

    @property
    def forwarded(self) -> tuple[int, ...]:
        """Signals to pass on to the workers.

        By default, signals that the program itself handles are not passed on.
        """
        if self._forwarded is not None:
            return self._forwarded
        found = defaults.forwarded_signals(None, self.signals)
        return tuple(signum for signum in found if signal.getsignal(signum) == signal.SIG_DFL)

    @property
    def prefix_template(self) -> str | None:
        return self._prefix_template or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")

    def config(self, rendezvous: Rendezvous | None = None) -> JobSpec:
        """Return the specification of the job.

        ``rendezvous`` is ``None`` for a single node, and if the methods of the handler must be called.
        """
        spec = self._spec
        # A subclass of the user may have overridden the methods.
        alone = spec.rdzv_handler if type(spec.rdzv_handler) is OneNodeRendezvous else None
        calls_handler = rendezvous is None and alone is None
        function, command = spec.entrypoint, (spec.entrypoint, *spec.args)
        return JobSpec(
            spec.local_world_size,
            spec.rdzv_handler.get_run_id(),
            command=command if callable(function) else [str(word) for word in command],
            start_method=self.start_method,
            variables={"TORCHELASTIC_SIGNALS_TO_HANDLE": self._signal_names},
            logs=LogSettings(
                logs_specs=self.logs_specs,
                log_line_prefix_template=self.prefix_template,
                duplicate_stdout_filters=spec.duplicate_stdout_filters or (),
                duplicate_stderr_filters=spec.duplicate_stderr_filters or (),
            ),
            role=spec.role,
            name=spec.get_entrypoint_name(),
            max_restarts=spec.max_restarts,
            shutdown_timeout=self._shutdown_timeout,
            signals=self.signals,
            forwarded=self.forwarded,
            stop_scope=spec.stop_scope or defaults.default_stop_scope(function),
            rendezvous=rendezvous,
            make_handler=(lambda: spec.rdzv_handler) if calls_handler else None,
            exit_barrier_timeout=self._exit_barrier_timeout,
            monitor_interval=spec.monitor_interval,
            rdzv_backend=spec.rdzv_handler.get_backend(),
            master_addr="localhost" if alone is None else alone.address,
            master_port=None if alone is None else alone.port,
            event_log_handler=spec.event_log_handler,
            has_metrics=True,
            cpus=cpus_of_options(spec.numa_options, spec.local_world_size),
            virtual_local_rank=spec.virtual_local_rank,
            uninterruptible_state_timeout=self.uninterruptible_state_timeout,
            preload=self._preload,
            **defaults.worker_settings(spec),
        )

    def observers(self) -> Sequence[Observer]:
        """Return an observer that prints tee'd lines to the program's replaced standard streams, if any."""
        streams = replaced_streams()
        return [ReplacedConsole(streams, self._spec.role, self.prefix_template)] if streams else []


def own_consoles() -> set[int]:
    """Return the descriptors (1, 2) of those standard streams that the program has not replaced."""
    return {1, 2} - replaced_streams().keys()


def _entry(spec: WorkerSpec, start_method: str) -> Entry:
    from elasticrs._engine.workers.warm import modules as warm

    if callable(spec.entrypoint):
        return warm.entry_of_function(spec.entrypoint, spec.args, start_method)
    return warm.entry_of_command([str(spec.entrypoint), *map(str, spec.args)])


def _preload(spec: WorkerSpec, start_method: str) -> Preload | None:
    # The fields of a mock specification are mocks.
    if not isinstance(spec.warm, str) or spec.warm == "off":
        return None
    from elasticrs._engine.workers.warm import modules as warm

    try:
        return warm.preload(spec.warm, _entry(spec, start_method))
    except defaults.UsageError as error:
        raise ValueError(f"warm: got {spec.warm!r}, but {error}") from None


class ReplacedConsole(Observer):
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


def outcome(job: JobSpec, result: JobResult, decisions: Decisions) -> RunResult:
    """Return torch's result of a job. Raise if a signal, or an error before any worker ran, has ended it."""
    if result.phase is Phase.SUCCEEDED:
        return RunResult(WorkerState.SUCCEEDED, return_values=result.return_values)
    if result.signum is not None:
        sigval = signal.Signals(result.signum)
        raise SignalException(f"stopped by {sigval.name}", sigval)
    if isinstance(decisions, HandlerNodes) and decisions.error is not None:
        raise decisions.error
    from elasticrs._engine.failures.failure import root_cause
    from elasticrs._engine.job.config import ExitCodes
    from elasticrs._engine.supervise.observe.job_report import all_failures, exit_code

    failed = all_failures(result)
    code = exit_code(ExitCodes.parse(job.exit_codes), result, failed)
    if failed:
        if result.message is not None:
            root = failed[root_cause(failed)]
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
