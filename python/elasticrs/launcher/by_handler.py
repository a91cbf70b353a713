"""Run command-line jobs whose rendezvous must be polled: another package's, or ``store_type=file``."""

from __future__ import annotations

import logging
import os
import signal
from typing import TYPE_CHECKING, Any

from elasticrs._engine.job import phrases
from elasticrs._engine.job.config import UsageError
from elasticrs._engine.supervise.observe import check_destination, open_server
from elasticrs._engine.supervise.run.signals import suspend
from elasticrs._engine.supervise.run_job import make_workers, remove_logs
from elasticrs._engine.workers.process import SupervisorError
from elasticrs.agent.server.local_elastic_agent import LocalElasticAgent
from elasticrs.agent.server.polled_workers import raised_signals
from elasticrs.agent.server.worker_group import WorkerSpec
from elasticrs.launcher.api import run_agent, shut_down_after
from elasticrs.multiprocessing.api import DefaultLogsSpecs, SignalException
from elasticrs.multiprocessing.errors import ChildFailedError
from elasticrs.rendezvous import registry
from elasticrs.rendezvous.api import RendezvousError, RendezvousHandler, RendezvousParameters, is_kind

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.process.console import Console
    from elasticrs._engine.supervise.run.signals import SignalPipe
    from elasticrs._engine.supervise.run.workers import Workers
    from elasticrs.agent.server.worker_group import RunResult

_DEFAULT_TIMEOUT = 900
"""Timeout in seconds that torch's launcher passes to every handler."""


def run_by_handler(
    job: JobSpec, console: Console, signals: SignalPipe | None, write: Callable[[str], object]
) -> int:
    """Run the job through its rendezvous handler.

    Return the exit code. Raise ``UsageError`` if the settings are invalid.
    """
    if job.event_log_handler != "null":
        check_destination(job.event_log_handler)
    workers = make_workers(job)
    for notice in job.notices:
        console.say(notice)
    agent: LocalElasticAgent | None = None
    logger, lines = logging.getLogger("elasticrs"), _Lines(console)
    logger.addHandler(lines)

    def stop_for_a_while(_signum: int, _frame: FrameType | None) -> None:
        # Handle only SIGTSTP here. The handlers of the other signals raise exceptions instead.
        if signals is not None and signal.SIGTSTP in signals.take():
            if agent is None:
                suspend(None, signals)
            else:
                agent._suspend(signals)

    try:
        with raised_signals(job.signals):
            if signals is not None:
                for signum in signals.take():
                    if signum in job.signals:
                        raise SignalException(
                            f"stopped by {phrases.signal_name(signum)}", signal.Signals(signum)
                        )
                if signal.SIGTSTP not in job.signals and signal.SIGTSTP in signals.caught:
                    signal.signal(signal.SIGTSTP, stop_for_a_while)
                    signals.order_pauses()
            agent = _make_agent(job, _make_handler(job), workers, console)
            return _run(agent, job, console, write)
    except SignalException as error:
        if agent is None:
            console.say(f"stopped by {error.sigval.name}")
        return 1
    except Exception as error:
        if not is_kind(error, RendezvousError):
            raise
        console.say(f"the rendezvous failed: {error}")
        return 1
    finally:
        logger.removeHandler(lines)
        remove_logs(workers, console)


class _Lines(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.say(self.format(record))


def _make_agent(
    job: JobSpec, handler: RendezvousHandler, workers: Workers, console: Console
) -> LocalElasticAgent:
    spec = WorkerSpec(
        job.role,
        job.nproc,
        handler,
        entrypoint=job.entry_point,
        # `LocalElasticAgent` does not support a time window for restarts. The launcher has warned the user.
        max_restarts=int(job.max_restarts),
        monitor_interval=job.monitor_interval,
        local_addr=job.local_addr,
        event_log_handler=job.event_log_handler,
        log_prefix=job.log_prefix,
        signals_to_forward=",".join(signal.Signals(signum).name for signum in job.forwarded),
    )
    agent = LocalElasticAgent(
        spec,
        # Torch requires this setting, but it has no effect, because the workers choose their own log files.
        DefaultLogsSpecs(os.devnull),
        exit_barrier_timeout=job.exit_barrier_timeout,
        shutdown_timeout=job.shutdown_timeout,
        uninterruptible_state_timeout=job.uninterruptible_state_timeout,
        health_check_server=None if job.health_check_port is None else open_server(job, console.say),
        signals_to_handle=job.variables["TORCHELASTIC_SIGNALS_TO_HANDLE"],
    )
    agent._local.made = job, workers
    return agent


def _make_handler(job: JobSpec) -> RendezvousHandler:
    backend, endpoint, (low, high) = job.rdzv_backend, job.rdzv_endpoint, job.nnodes
    config: dict[str, Any] = {"timeout": _DEFAULT_TIMEOUT, **job.rdzv_conf}
    parameters = RendezvousParameters(backend, endpoint, job.run_id, low, high, job.local_addr, **config)
    try:
        return registry.get_rendezvous_handler(parameters)
    except (SignalException, UsageError):
        raise
    except ValueError as error:
        raise UsageError(f"--rdzv-backend {backend}: {error}") from error
    except Exception as error:
        if not is_kind(error, RendezvousError):
            raise UsageError(f"--rdzv-backend: {backend!r} failed: {error!r}") from error
        raise


def _run(agent: LocalElasticAgent, job: JobSpec, console: Console, write: Callable[[str], object]) -> int:
    with shut_down_after(agent.get_worker_group().spec.rdzv_handler):
        try:
            result = run_agent(agent, job.event_log_handler)
            if result.is_failed():
                _report(result, job.name, console, write)
            return int(result.is_failed())
        except (RuntimeError, SupervisorError, OSError) as error:
            write(console.prefixed(f"the job was stopped: {error}{os.linesep}"))
            return 1


def _report(result: RunResult, name: str, console: Console, write: Callable[[str], object]) -> None:
    if not result.failures:
        write(console.prefixed(f"the job has failed{os.linesep}"))
        return
    from elasticrs._engine.failures.report import how_it_failed
    from elasticrs._engine.supervise.observe.job_report import hand_on

    error = ChildFailedError(name, result.failures)
    rank, first = error.get_first_failure()
    headline = f"rank {rank}{how_it_failed(first)}"
    write(error.format_msg() + os.linesep)
    write(console.prefixed(f"failed: {headline}{os.linesep}"))
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        hand_on(error, headline)
