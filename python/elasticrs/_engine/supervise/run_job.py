"""Runs a job on this node, for the command line, the launcher's API and torch's agent class."""

from __future__ import annotations

from elasticrs._engine.process.signals import ignored_signals
from elasticrs._engine.supervise.observe import make_observers
from elasticrs._engine.supervise.run.loop import Agent
from elasticrs._engine.supervise.run.workers import CommandWorkers, WorkerSetup
from elasticrs._engine.workers.plan import KEEP_FRAMEWORKS, hook_environment, inherited_environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import TypeAlias

    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.process.console import Console
    from elasticrs._engine.process.signals import SignalPipe
    from elasticrs._engine.supervise.attempt import JobResult
    from elasticrs._engine.supervise.decide.decisions import Decisions
    from elasticrs._engine.supervise.observe.health_check_server import HealthCheckServer
    from elasticrs._engine.supervise.observe.observer import Observer
    from elasticrs._engine.supervise.run.workers import Workers
    from elasticrs._engine.workers.logs import LogPaths

    AttemptLogs: TypeAlias = Callable[[str, dict[int, dict[str, str]]], LogPaths]


def run_job(
    job: JobSpec,
    console: Console,
    signals: SignalPipe | None,
    *,
    owns_process: bool,
    created: Callable[[Agent], object],
    decisions: Decisions | None = None,
    server: HealthCheckServer | None = None,
    observers: Sequence[Observer] = (),
    consoles: Collection[int] = (1, 2),
) -> JobResult:
    """Run a job to its end on this node. Raises ``UsageError``, and the exceptions of :meth:`.Agent.run`.
    If ``owns_process``, the process runs nothing but the launcher, so events record the agent's end.
    ``created`` is called with the agent before the agent runs. ``consoles`` are the file descriptors (1, 2)
    on which the workers' output is shown.
    """
    workers = make_workers(job, consoles)
    for notice in job.notices:
        console.say(notice)
    if job.is_observed or server is not None:
        observers = (*make_observers(job, console.say, server, tells_end=owns_process), *observers)
    agent = Agent(
        *(job, workers, decisions or make_decisions(job, console)),
        signals=signals,
        owns_process=owns_process,
        console=console,
        observers=observers,
    )
    created(agent)
    try:
        return agent.run()
    finally:
        try:
            workers.setup.remove_logs()
        except OSError as error:
            console.say(f"a log folder could not be removed: {error.strerror}")


def make_workers(job: JobSpec, consoles: Collection[int] = (1, 2)) -> Workers:
    """Create a job's workers and their log folder. Raises ``UsageError`` if that fails."""
    logs, remove = _logs(job)
    frameworks = {KEEP_FRAMEWORKS: "1"} if job.keep else {}
    environ = hook_environment({**inherited_environment(), **job.variables, **frameworks})
    setup = WorkerSetup(job, logs, environ, ignored_signals(), consoles, remove)
    if job.run_path:
        from elasticrs._engine.supervise.run.function_workers import script_workers

        return script_workers(setup, job.command, job.start_method)
    if callable(job.command[0]):
        from elasticrs._engine.supervise.run.function_workers import function_workers

        return function_workers(setup, job.command[0], job.command[1:], job.start_method)
    return CommandWorkers(setup, [str(word) for word in job.command])


def _logs(job: JobSpec) -> tuple[AttemptLogs, Callable[[], object]]:
    """Return a function that creates an attempt's log files, and one that removes an empty log folder."""
    if job.logs.logs_specs is None:
        from elasticrs._engine.workers.logs import RunLogs

        logs = RunLogs(job.logs, job.run_id, job.nproc)
        return logs.attempt, logs.remove_if_empty
    from elasticrs._engine import public

    specs, attempt_logs = job.logs.logs_specs, public("multiprocessing.logs_specs.attempt_logs")
    if not isinstance(specs, str):
        return attempt_logs(specs), tuple  # The object belongs to the caller, who removes the folder.
    specs = public("multiprocessing.logs_specs.make_logs_specs")(job.logs, job.nproc)
    # A user-defined log class may lack `_remove_if_empty`. Its empty log folder is not removed.
    return attempt_logs(specs), getattr(specs, "_remove_if_empty", tuple)


def make_decisions(job: JobSpec, console: Console) -> Decisions:
    """Create the object that makes the agent's decisions, and import only the module of its class."""
    if job.make_handler is not None:
        from elasticrs._engine.supervise.decide.handler_nodes import HandlerNodes

        return HandlerNodes(job, job.make_handler, console)
    if job.rendezvous is None:
        if job.on_failure == "replace":
            from elasticrs._engine.supervise.decide.member_workers import MemberWorkers

            return MemberWorkers(job)
        from elasticrs._engine.supervise.decide.decisions import OneNode

        return OneNode(job)
    if job.on_failure == "replace":
        from elasticrs._engine.supervise.decide.member_nodes import MemberNodes

        return MemberNodes(job, job.rendezvous, console)
    from elasticrs._engine.supervise.decide.several_nodes import SeveralNodes

    return SeveralNodes(job, job.rendezvous, console)
