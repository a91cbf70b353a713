"""Settings of a job and its workers, derived from a :class:`WorkerSpec` and the arguments of an agent."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from elasticrs._engine.gpus.numa import cpus_of_options
from elasticrs._engine.job import config as defaults
from elasticrs._engine.job.config import JobSpec, LogSettings
from elasticrs._engine.supervise.observe.observer import Observer
from elasticrs._engine.supervise.run_job import make_workers
from elasticrs._engine.workers.logs import line_prefixes
from elasticrs.multiprocessing.tail_log import TailLog, replaced_streams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TextIO

    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
    from elasticrs._engine.supervise.attempts.attempt import Attempt, JobResult
    from elasticrs._engine.supervise.run.workers import Workers
    from elasticrs._engine.workers.warm import Entry, Preload
    from elasticrs.agent.server.worker_group import WorkerSpec
    from elasticrs.multiprocessing.api import LogsSpecs


class LocalJob:
    """Settings of one agent's job. See :class:`~elasticrs.agent.server.LocalElasticAgent` for the arguments.

    Attributes:
        made: configuration and workers that the command line has already created; ``None`` if this object
            creates them.

    Raises:
        ValueError: an argument is not supported by this release, or a name is not a signal or module.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        start_method: str,
        prefix_template: str | None,
        shutdown_timeout: float,
        uninterruptible_state_timeout: float | None,
        signals_to_handle: str | None,
    ) -> None:
        defaults.check_start_method(start_method)
        names = signals_to_handle or os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
        self._signal_names = names or defaults.DEFAULT_SIGNALS
        try:
            self.signals = defaults.parse_signals(self._signal_names)
        except ValueError as error:
            raise ValueError(f"signals_to_handle: expected {error}") from None
        # Check the type, because programs may pass a `Mock(spec=WorkerSpec)`, whose fields are mocks. A real
        # `WorkerSpec` has already validated its fields.
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
        self._prefix_template = prefix_template
        self.made: tuple[JobSpec, Workers] | None = None

    @property
    def forwarded(self) -> tuple[int, ...]:
        """Signals to pass on to the workers. By default, signals for which the program has its own handler
        are not passed on.
        """
        if self._forwarded is not None:
            return self._forwarded
        found = defaults.forwarded_signals(None, self.signals)
        return tuple(signum for signum in found if signal.getsignal(signum) == signal.SIG_DFL)

    @property
    def prefix_template(self) -> str | None:
        """Template for the prefix of tee'd lines, or ``None`` for the default prefix."""
        return self._prefix_template or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")

    def config(self, rendezvous: Rendezvous | None = None) -> JobSpec:
        """Return the job. ``rendezvous`` is that of a job on several nodes whose agent uses the event-driven
        loop.
        """
        if self.made is not None:
            return self.made[0]
        spec = self._spec
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
            is_multi_node=rendezvous is not None,
            rendezvous=rendezvous,
            rdzv_backend=spec.rdzv_handler.get_backend(),
            event_log_handler=spec.event_log_handler,
            has_metrics=True,
            cpus=cpus_of_options(spec.numa_options, spec.local_world_size),
            virtual_local_rank=spec.virtual_local_rank,
            uninterruptible_state_timeout=self.uninterruptible_state_timeout,
            preload=self._preload,
            **defaults.worker_settings(spec),
        )

    def workers(self, job: JobSpec) -> Workers:
        """Return the object that starts the workers for an agent whose hooks decide."""
        return make_workers(job, own_consoles()) if self.made is None else self.made[1]

    def observers(self) -> Sequence[Observer]:
        """Return the observer that prints the workers' tee'd lines to the streams with which the program has
        replaced ``sys.stdout`` and ``sys.stderr``, if it has.
        """
        streams = replaced_streams()
        return [ReplacedConsole(streams, self._spec.role, self.prefix_template)] if streams else []


def own_consoles() -> set[int]:
    """Return the descriptors (1, 2) of those standard streams that the program has not replaced."""
    return {1, 2} - replaced_streams().keys()


def _entry(spec: WorkerSpec, start_method: str) -> Entry:
    from elasticrs._engine.workers import warm

    if callable(spec.entrypoint):
        return warm.entry_of_function(spec.entrypoint, spec.args, start_method)
    return warm.entry_of_command([str(spec.entrypoint), *map(str, spec.args)])


def _preload(spec: WorkerSpec, start_method: str) -> Preload | None:
    # Check the type, because programs may pass a mock specification, whose fields are mocks.
    if not isinstance(spec.warm, str) or spec.warm == "off":
        return None
    from elasticrs._engine.workers import warm

    try:
        return warm.preload(spec.warm, _entry(spec, start_method))
    except defaults.UsageError as error:
        raise ValueError(f"warm: got {spec.warm!r}, but {error}") from None


class ReplacedConsole(Observer):
    """Observer for a program that has replaced ``sys.stdout`` or ``sys.stderr``. Copies the workers' console
    output to the program's own streams while the workers run.
    """

    def __init__(self, streams: Mapping[int, TextIO], role: str, template: str | None) -> None:
        self._streams = streams
        self._role = role
        self._template = template
        self._tails: list[TailLog] = []

    def prepared(self, attempt: Attempt) -> None:
        """Start copying from the log files of the attempt."""
        self._stop()
        paths = attempt.paths
        prefixes = line_prefixes(self._template, attempt.plan.ranks)
        for fd, stream in self._streams.items():
            tees = paths.tee_stdouts if fd == 1 else paths.tee_stderrs
            files = {rank: path for rank, path in tees.items() if path != os.devnull}
            self._tails.append(TailLog(self._role, files, stream, prefixes).start())

    def over(self, attempt: Attempt, outcome: str) -> None:  # noqa: ARG002 -- the base class's signature
        """Copy the remaining lines and stop, because the exited workers write no further lines."""
        self._stop()

    def ended(self, result: JobResult, error: BaseException | None) -> None:  # noqa: ARG002 -- as above
        """Copy the remaining lines at the end of the job."""
        self._stop()

    def _stop(self) -> None:
        while self._tails:
            self._tails.pop().stop()
