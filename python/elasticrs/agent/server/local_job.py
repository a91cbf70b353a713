"""What ``LocalElasticAgent`` passes to :func:`.run_job` and makes of its result, in torch's types."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from elasticrs._engine.job import config as defaults
from elasticrs._engine.supervise.attempts.state_machine import Phase
from elasticrs._engine.supervise.decide.handler_nodes import HandlerNodes
from elasticrs._engine.supervise.observe.observer import Observer
from elasticrs._engine.workers.functions.supervised_group import not_started
from elasticrs._engine.workers.logs import line_prefixes
from elasticrs.agent.server.worker_group import RunResult, WorkerState
from elasticrs.multiprocessing.api import SignalException
from elasticrs.multiprocessing.tail_log import TailLog, replaced_streams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TextIO

    from elasticrs._engine.job.config import JobSpec, Preload
    from elasticrs._engine.supervise.attempts.attempt import Attempt, JobResult
    from elasticrs._engine.supervise.decide.decisions import Decisions
    from elasticrs._engine.workers.warm.modules import Entry
    from elasticrs.agent.server.worker_group import WorkerSpec


def replaced_consoles(job: JobSpec) -> Sequence[Observer]:
    """Return an observer that prints tee'd lines to the program's replaced standard streams, if any."""
    streams = replaced_streams()
    return [ReplacedConsole(streams, job.role, job.logs.log_line_prefix_template)] if streams else []


def own_consoles() -> set[int]:
    """Return the descriptors (1, 2) of those standard streams that the program has not replaced."""
    return {1, 2} - replaced_streams().keys()


def _entry(spec: WorkerSpec, start_method: str) -> Entry:
    from elasticrs._engine.workers.warm import modules as warm

    if callable(spec.entrypoint):
        return warm.entry_of_function(spec.entrypoint, spec.args, start_method)
    return warm.entry_of_command([str(spec.entrypoint), *map(str, spec.args)])


def preload(spec: WorkerSpec, start_method: str) -> Preload | None:
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
    """Convert a job's result to torch's. Raise if the job ended by a signal, or before any worker ran."""
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
