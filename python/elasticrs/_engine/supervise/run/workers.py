"""Describes for the Rust core which worker processes to start, and where to write their output."""

from __future__ import annotations

import errno
import os
import signal
import sys
from abc import ABC, abstractmethod
from functools import partial

from elasticrs import _core
from elasticrs._engine.failures.failure import error_file_of, fault_file, flight_dumps, hang_file, set_aside
from elasticrs._engine.job.config import UsageError, hang_limits
from elasticrs._engine.job.value import Value
from elasticrs._engine.process.console import wants_colour
from elasticrs._engine.workers.logs import LogPaths, coloured, line_prefixes
from elasticrs._engine.workers.plan import (
    KEEP,
    rank_variables,
    virtual_local_rank,
    warm_environment,
    worker_env,
)
from elasticrs._engine.workers.process import console_stream, follower_of, process_spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from dataclasses import KW_ONLY

    from elasticrs._engine.job.config import JobSpec, Preload
    from elasticrs._engine.supervise.attempt import Attempt
    from elasticrs._engine.workers.plan import Plan
    from elasticrs._engine.workers.process import Follower


_STOP_DELAY = 1.0
"""Seconds between a hang and the stop of the workers. In this time, other nodes gather evidence."""

_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Environment variables for the path of torch's flight record dumps. Torch uses the first one that is set."""

_TIMER_FILE = "ELASTICRS_TIMER_FILE"
"""Environment variable that tells elasticrs's timer client that an elasticrs agent reads the timers' FIFO.
Otherwise, the client must not keep the FIFO open, because torch's timer server expires no timers while the
FIFO is open.
"""

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def _bad_timer_file(path: str, error: OSError) -> str:
    if error.errno == errno.EEXIST:
        wrong, remedy = "the path already exists", "choose a path that does not exist yet"
    elif error.errno == errno.EBUSY:
        wrong, remedy = "another agent or timer server reads that FIFO", "choose another path"
    else:
        wrong, remedy = os.strerror(error.errno or 0), "choose a path where this user can create a FIFO"
    return f"TORCHELASTIC_TIMER_FILE={path!r}: {wrong}; {remedy}, or unset it"


def _enough(limit: float | None) -> float | None:
    """Return the time limit, but at least 1 ms, because the agent does not check time limits more often."""
    return None if limit is None else max(0.001, limit)


class WorkerSetup(Value):
    """Data that all kinds of workers need to start.

    Args:
        logs: creates the files of an attempt. Its arguments are the attempt's name, and the workers'
            variables by local rank, to which it adds the path of the error file.
        keep_ignored: signals that stay ignored in the workers.
        consoles: descriptors (1, 2) on which the core prints the workers' output.
        remove_logs: removes the temporary log folder after the job if it contains no files.
    """

    job: JobSpec
    logs: Callable[[str, dict[int, dict[str, str]]], LogPaths]
    environ: Mapping[str, str]
    keep_ignored: Sequence[int] = ()
    consoles: Collection[int] = (1, 2)
    remove_logs: Callable[[], object] = tuple

    @property
    def preload(self) -> Preload | None:
        preload = self.job.preload
        return preload if preload is not None and preload.modules else None


class Leftovers(Value):
    """What the Rust core does not report about the end of an attempt.

    Args:
        ended: pid and name of the first few killed processes that the core had not started.
        more_ended: number of further such processes.
        was_stopped: true if a stop was requested while leftover processes were allowed to continue.
        silent: local ranks of workers that should have returned a value but did not.
        why_not_started: reason why a keeper could not start the workers.
    """

    ended: Sequence[tuple[int, str]] = ()
    more_ended: int = 0
    _: KW_ONLY
    was_stopped: bool = False
    silent: Collection[int] = ()
    why_not_started: str | None = None


class Workers(ABC):
    """Base class of the workers of a job. One object is used for all attempts.

    Attributes:
        are_started: true if all workers run, including those that the core does not start.
        leftovers: ``None`` until all processes of the attempt have exited.
        warm_command: common part of the workers' command lines; ``None`` without a warm nursery.
        follower: debugger or tracer that follows the workers, so that they start cold.
        unfollowed: profiler in ``sys.executable`` that does not follow the workers.
    """

    are_started: bool = True
    leftovers: Leftovers | None = Leftovers()
    warm_command: Sequence[str] | None = None
    follower: Follower | None = None
    unfollowed: str | None = None
    may_fork: bool = True

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup

    @property
    def are_warm(self) -> bool:
        return self.warm_command is not None and self.may_fork

    @abstractmethod
    def specs(self, paths: LogPaths, environments: Mapping[int, dict[str, str]]) -> list[_core.ProcessSpec]:
        """Return the processes of an attempt by local rank. ``environments`` are complete."""

    def replacement(self, paths: LogPaths, local_rank: int, environ: dict[str, str]) -> _core.ProcessSpec:
        """Return the process that replaces a worker. ``environ`` is complete."""
        (process,) = self.specs(paths, {local_rank: environ})
        return process

    @abstractmethod
    def return_values(self, attempt: Attempt) -> dict[int, object]:
        """Return the values that the workers of the last attempt returned, by global rank."""

    # Subclasses that own further resources, such as pipes, override the following methods.

    def started(self, supervisor: _core.Supervisor, attempt: Attempt) -> None:  # noqa: B027 -- optional to override
        """Called after the core has started all of its workers."""

    def replaced(self, supervisor: _core.Supervisor, local_rank: int) -> None:  # noqa: B027 -- optional to override
        """Handle the start of the process that :meth:`replacement` returned."""

    def fd_ready(self, supervisor: _core.Supervisor, fd: int) -> None:  # noqa: B027 -- optional to override
        ...

    def stop(self) -> None:  # noqa: B027 -- optional to override
        """Handle a request to stop the workers. The Rust core has already received the request."""

    def ended(self, supervisor: _core.Supervisor, *, has_succeeded: bool = False) -> None:  # noqa: B027 -- optional to override
        """Handle the end of the processes that the core started, or the failure of their start."""

    def close(self) -> None:  # noqa: B027 -- optional to override
        """Kill the remaining processes and release all resources. Idempotent."""


def watch_timers(setup: WorkerSetup, supervisor: _core.Supervisor) -> dict[str, str]:
    """Begin to watch the workers' timers and heartbeats. Return the environment variables that tell the
    workers the timer file. Raise ``UsageError`` if the user's timer file cannot be used.
    """
    variables: dict[str, str] = {}
    environ = setup.environ
    if environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1":
        path = environ.get("TORCHELASTIC_TIMER_FILE") or None
        try:
            timer_file = supervisor.watch_timers(path)
        except OSError as error:
            if path is None or error.errno in _EXHAUSTED:
                raise
            raise UsageError(_bad_timer_file(path, error)) from error
        variables = {"TORCHELASTIC_TIMER_FILE": timer_file, _TIMER_FILE: timer_file}
    watch_hangs(setup, supervisor)
    return variables


def watch_hangs(setup: WorkerSetup, supervisor: _core.Supervisor, least: float = 0.0) -> None:
    """Watch heartbeats from the next attempt on. Limits learned from steps are at least ``least`` seconds."""
    job = setup.job
    if job.hang_timeout is None:
        return
    limit, shortest = hang_limits(job.hang_timeout)
    if least:
        shortest = max(least, shortest or 0.0)
    supervisor.watch_hangs(
        _enough(limit),
        startup=_enough(job.hang_startup_timeout),
        exit_limit=_enough(job.hang_exit_timeout or None),
        least=_enough(shortest),
        stop_delay=_STOP_DELAY if job.is_multi_node and job.on_failure != "replace" else 0.0,
    )


def prepare_group(
    workers: Workers, supervisor: _core.Supervisor, attempt: Attempt, extra: Mapping[str, str]
) -> _core.GroupSpec:
    """Create the log files of an attempt, and return the processes to start. Raises ``OSError``."""
    setup = workers.setup
    job, environ = setup.job, setup.environ
    variables = variables_of(job, attempt.plan, attempt.round, attempt.restarts, environ)
    for own in variables.values():
        own.update(extra)
    # A user-defined `LogsSpecs` class may read and change the variables.
    attempt.paths = paths = setup.logs(attempt.name, variables)
    files = [path for _, path in sorted(paths.error_files.items())]
    are_watched = bool(files) and all(files)
    notices = supervisor.watch_exits(job.exit_timeout or None) if are_watched else ""
    attempt.variables = variables
    for local_rank, own in variables.items():
        own["ELASTICRS_NOTICES"] = notices
        if attempt.plan.keep_places:
            own[KEEP] = attempt.plan.keep_places[local_rank]
        if are_watched and not any(name in environ for name in _DUMPS):
            own[_DUMPS[0]] = flight_dumps(paths.error_files[local_rank])
        own.update(_member(attempt.plan, local_rank))
    processes = workers.specs(paths, {
        local_rank: {**environ, **own} for local_rank, own in variables.items()
    })  # fmt: skip
    group = _core.GroupSpec(
        processes,
        on_failure=_core.StopPolicy(signal.SIGTERM, job.shutdown_timeout),
        stop_scope=job.stop_scope,
        linger=job.linger,
        keep_ignored=setup.keep_ignored,
        replaces=job.on_failure == "replace",
        keep_grace=job.keep_grace,
    )
    streams = _streams(setup, attempt)
    if streams:
        supervisor.follow(streams)
    evidence = [(fault_file(path), hang_file(path)) for path in files] if are_watched else []
    is_watched = _TIMER_FILE in extra or job.hang_timeout is not None
    supervisor.keep_evidence(evidence, py_spy=_py_spy(environ) if is_watched else None)
    return group


def prepare_replacement(
    workers: Workers,
    supervisor: _core.Supervisor,
    attempt: Attempt,
    local_rank: int,
    restarts: int,
    say: Callable[[str], None],
) -> _core.ProcessSpec:
    """Return the process that replaces a dead worker. It appends to the log files of that worker."""
    setup, paths = workers.setup, attempt.paths
    own = attempt.variables[local_rank]
    own["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
    before = own["RANK"]
    # Nodes may have joined or left since the start of the attempt.
    own.update(rank_variables(attempt.plan.ranks[local_rank]))
    own.update(MASTER_ADDR=attempt.plan.master_addr, MASTER_PORT=str(attempt.plan.master_port))
    own.update(_member(attempt.plan, local_rank))
    error_file = paths.error_files.get(local_rank)
    if error_file:
        kept = error_file_of(error_file, attempt.pids[local_rank])
        error = attempt.files.run(partial(set_aside, error_file, kept, int(before)), None)
        if error is not None:
            who = attempt.who(local_rank)
            say(f"{who}: a file of the replaced worker is not renamed: {error.strerror}: {error.filename}")
    streams = [each for each in _streams(setup, attempt) if each.local_rank == local_rank]
    if streams:
        supervisor.follow(streams)
    return workers.replacement(paths, local_rank, {**setup.environ, **own})


def _member(plan: Plan, local_rank: int) -> dict[str, str]:
    """Choose a worker's name in the rendezvous. A replacement also gets its predecessor's name, so that other
    workers need not wait until that worker's lease expires.
    """
    if plan.members is None:
        return {}
    before = plan.members.get(local_rank)
    plan.members[local_rank] = name = plan.member_prefix + os.urandom(8).hex()
    if plan.page is not None:
        plan.page.clear(local_rank)
    return {"ELASTICRS_TRAIN_MEMBER": name if before is None else f"{name} {before}"}


def _streams(setup: WorkerSetup, attempt: Attempt) -> list[_core.LogStream]:
    streams: list[_core.LogStream] = []
    paths = attempt.paths
    logs = setup.job.logs
    prefixes = line_prefixes(logs.log_line_prefix_template, attempt.plan.ranks)
    for to, tees, copy, filters in (
        (1, paths.tee_stdouts, paths.filtered_stdout, logs.duplicate_stdout_filters),
        (2, paths.tee_stderrs, paths.filtered_stderr, logs.duplicate_stderr_filters),
    ):
        contains = [os.fsencode(text) for text in filters] if copy else []
        colour = wants_colour(to, setup.environ)
        for local_rank, path in tees.items():
            if path == os.devnull:
                continue
            text = prefixes[local_rank]
            if to in setup.consoles:
                prefix = coloured(text, local_rank) if colour else text
                streams.append(console_stream(local_rank, path, to, prefix))
            if contains:
                plain = os.fsencode(text)
                streams.append(_core.LogStream(local_rank, path, copy, plain, contains=contains))
    return streams


def variables_of(
    job: JobSpec,
    plan: Plan,
    round: int,  # noqa: A002 -- the usual name for this number
    restarts: int,
    inherited: Mapping[str, str],
) -> dict[int, dict[str, str]]:
    variables = {
        ranks.local_rank: worker_env(ranks, job, plan, round=round, restarts=restarts, inherited=inherited)
        for ranks in plan.ranks
    }
    for own in variables.values():
        own.update(plan.variables)
    if job.virtual_local_rank:
        for local_rank, own in variables.items():
            own.update(virtual_local_rank(local_rank, inherited))
    return variables


def warm_nursery(workers: Workers, report: int) -> _core.WarmNursery | None:
    """Return the nursery (the process that imports modules and forks the workers), if there is any import."""
    setup, command = workers.setup, workers.warm_command
    if setup.preload is None or command is None:
        return None
    env = warm_environment(dict(setup.environ), setup.preload, os.path.abspath(_core.__file__))
    process = _core.ProcessSpec(0, command, env=env)
    return _core.WarmNursery(
        process, report_fd=report, limit=setup.job.warm_timeout, ignored=setup.keep_ignored
    )


def _py_spy(environ: Mapping[str, str]) -> str | None:
    folders = [*environ.get("PATH", os.defpath).split(os.pathsep), os.path.dirname(sys.executable)]
    paths = (os.path.join(folder, "py-spy") for folder in folders)
    return next((path for path in paths if os.access(path, os.X_OK)), None)


class CommandWorkers(Workers):
    """Workers that run a program. ``${local_rank}`` in its arguments is replaced, as in torch."""

    def __init__(self, setup: WorkerSetup, command: Sequence[str]) -> None:
        super().__init__(setup)
        self._command = command
        self.follower = follower_of(command)
        if setup.preload is not None and self.follower is None:
            self.warm_command = command

    def specs(self, paths: LogPaths, environments: Mapping[int, dict[str, str]]) -> list[_core.ProcessSpec]:
        cpus = self.setup.job.cpus
        return [
            process_spec(
                local_rank,
                [self._command[0], *(_filled_in(argument, local_rank) for argument in self._command[1:])],
                env,
                paths.stdouts.get(local_rank),
                paths.stderrs.get(local_rank),
                cpus=None if cpus is None else cpus[local_rank],
                warm=self.are_warm,
            )
            for local_rank, env in environments.items()
        ]

    def return_values(self, attempt: Attempt) -> dict[int, object]:
        """Return ``None`` for each rank, as torch does, because programs return no value."""
        return dict.fromkeys(attempt.global_ranks().values())


def _filled_in(argument: str, local_rank: int) -> str:
    if "$" not in argument:
        return argument
    from elasticrs._engine.workers.process import (
        macros,  # Import this lazily, because it imports `re`, which only macros need.
    )

    return str(macros.substitute([argument], str(local_rank))[0])
