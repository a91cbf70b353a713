"""The workers of an attempt as the core takes them: which processes, and where their output goes."""

from __future__ import annotations

import errno
import os
import signal
import sys
from abc import ABC, abstractmethod

from elasticrs import _core
from elasticrs._value import Value
from elasticrs._worker import warm_environment
from elasticrs.config import UsageError, hang_limits
from elasticrs.logs import (
    LogPaths,
    RunLogs,
    coloured,
    error_file_of,
    fault_file,
    hang_file,
    line_prefixes,
    wants_colour,
)
from elasticrs.worker_env import virtual_local_rank, worker_env

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from dataclasses import KW_ONLY

    from elasticrs.agent.attempt import Attempt
    from elasticrs.config import JobConfig
    from elasticrs.plan import Plan
    from elasticrs.warm import Preload


SupervisorError = _core.SupervisorError
"""The supervisor itself failed."""


def check_limits(
    nproc: int, hang_timeout: float | str | None, environ: Mapping[str, str], followed: int = 0
) -> None:
    """Compare with the machine's limits before anything is started; ``followed``: how many log files are
    read.

    Raises:
        ValueError: one of them does not allow that many processes or descriptors.
    """
    # A page of memory for each worker, and while they are started a second one to pass on.
    pages = 2 * nproc if hang_timeout is not None else 0
    # The FIFO, read and written, and a pidfd for each process that has a timer: one in each worker.
    timers = nproc + 2 if environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1" else 0
    _core.check_limits(nproc, followed, pages + timers)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors; processes that Python itself starts inherit it."""
    _core.raise_descriptor_limit()


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
    """The agent looks once a millisecond at most."""
    return None if limit is None else max(0.001, limit)


class WorkerSetup(Value):
    """What all kinds of workers need.

    Args:
        job: the job.
        logs: makes the files of an attempt from its name and the variables of its workers by local rank, to
            which it adds what workers need to know (their error file).
        prefix_template: of console lines.
        environ: the environment that all workers inherit.
        keep_ignored: signals that stay ignored in the workers.
        filters: tee'd lines of standard output and of standard error that contain one of these are copied.
        consoles: those of 1 and 2 on which the core shows tee'd lines.
    """

    job: JobConfig
    logs: Callable[[str, dict[int, dict[str, str]]], LogPaths]
    prefix_template: str | None
    environ: Mapping[str, str]
    keep_ignored: Sequence[int] = ()
    filters: tuple[Sequence[str], Sequence[str]] = ((), ())
    consoles: Collection[int] = (1, 2)

    @property
    def preload(self) -> Preload | None:
        """What is imported before workers are forked, if anything is."""
        preload = self.job.preload
        return preload if preload is not None and preload.modules else None


class Leftovers(Value):
    """What the core cannot tell of the end of workers.

    Args:
        ended: pid and name of each process that they left behind, that the core did not start, and that was
            ended; the first few.
        more_ended: how many more.
        was_stopped: those were to go on for a while, and the group was stopped meanwhile.
        silent: the local ranks that should have returned a value, and have not.
        why_not_started: why workers that the core does not start could not be.
    """

    ended: Sequence[tuple[int, str]] = ()
    more_ended: int = 0
    _: KW_ONLY
    was_stopped: bool = False
    silent: Collection[int] = ()
    why_not_started: str | None = None


class Workers(ABC):
    """The workers of a job's attempts, one attempt after another; a subclass says what they are.

    Args:
        setup: what all kinds need.

    Attributes:
        are_started: True if all workers of the attempt run, also those that the core does not start.
        leftovers: what else there is to say of the end of an attempt; ``None`` until nothing is left of it.
        warm_command: the command line of all workers, as far as they have it in common; ``None`` if none of
            them is to be forked from a warm nursery.
    """

    are_started: bool = True
    leftovers: Leftovers | None = Leftovers()
    warm_command: Sequence[str] | None = None

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup

    @abstractmethod
    def specs(self, paths: LogPaths, environments: Mapping[int, dict[str, str]]) -> list[_core.ProcessSpec]:
        """Return the processes of an attempt by local rank, with these files and their whole environment."""

    def replacement(self, paths: LogPaths, local_rank: int, environ: dict[str, str]) -> _core.ProcessSpec:
        """Return the process that takes the place of a worker, with its whole environment."""
        (process,) = self.specs(paths, {local_rank: environ})
        return process

    @abstractmethod
    def return_values(self, attempt: Attempt) -> dict[int, object]:
        """Return what the workers of the last attempt returned, by global rank."""

    # What follows is heard by workers that have more than the processes of the core: a keeper, return values.

    def started(self, supervisor: _core.Supervisor, attempt: Attempt) -> None:  # noqa: B027 -- see above
        """All workers of the attempt that the core starts run."""

    def replaced(self, supervisor: _core.Supervisor, local_rank: int) -> None:  # noqa: B027 -- see above
        """What :meth:`replacement` described runs."""

    def fd_ready(self, supervisor: _core.Supervisor, fd: int) -> None:  # noqa: B027 -- see above
        """A descriptor that the workers' side watches is readable."""

    def stop(self) -> None:  # noqa: B027 -- see above
        """The group is to be stopped, and the core has been told."""

    def ended(self, supervisor: _core.Supervisor, *, has_succeeded: bool = False) -> None:  # noqa: B027 -- see above
        """Nothing of the attempt is left that the core started, or it could not be started."""

    def close(self) -> None:  # noqa: B027 -- see above
        """No attempt follows: end what there is, whatever happened, and release it. Idempotent."""


def watch_timers(setup: WorkerSetup, supervisor: _core.Supervisor) -> str | None:
    """Watch expiration timers of all attempts, where ``TORCHELASTIC_ENABLE_FILE_TIMER=1`` asks for it, and
    signs of life, where ``--hang-timeout`` does. Return the FIFO of the timers.

    Raises:
        UsageError: what is at ``TORCHELASTIC_TIMER_FILE`` is not ours, or a FIFO cannot be made there.
        OSError: no FIFO can be made at all.
    """
    timer_file = None
    environ = setup.environ
    if environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1":
        path = environ.get("TORCHELASTIC_TIMER_FILE") or None
        try:
            timer_file = supervisor.watch_timers(path)
        except OSError as error:
            if path is None or error.errno in _EXHAUSTED:
                raise
            raise UsageError(_bad_timer_file(path, error)) from error
    job = setup.job
    if job.hang_timeout is not None:
        limit, least = hang_limits(job.hang_timeout)
        supervisor.watch_hangs(
            _enough(limit),
            startup=_enough(job.hang_startup_timeout),
            exit_limit=_enough(job.hang_exit_timeout or None),
            least=_enough(least),
        )
    return timer_file


def prepare_group(
    workers: Workers, supervisor: _core.Supervisor, attempt: Attempt, timer_file: str | None
) -> _core.GroupSpec:
    """Make all ready for the start of an attempt, and fill in its paths; return what is to be started, all or
    none.

    Raises:
        _core.SupervisorError: the supervisor cannot.
        OSError: a log directory could not be made, or descriptors ran out.
    """
    setup = workers.setup
    job, environ = setup.job, setup.environ
    variables = variables_of(job, attempt.plan, attempt.round, attempt.restarts, environ, timer_file)
    attempt.paths = paths = setup.logs(attempt.name, variables)
    files = [path for _, path in sorted(paths.error_files.items())]
    are_watched = bool(files) and all(files)
    notices = supervisor.watch_exits(job.exit_timeout or None) if are_watched else ""
    attempt.variables = variables
    for local_rank, own in variables.items():
        own["ELASTICRS_NOTICES"] = notices
        own.update(_member(attempt.plan, local_rank))
    processes = workers.specs(paths, {
        local_rank: {**environ, **own} for local_rank, own in variables.items()
    })  # fmt: skip
    group = _core.GroupSpec(
        processes,
        on_failure=_core.StopPolicy(signal.SIGTERM, job.shutdown_timeout),
        stop_scope=job.stop_scope,
        linger=job.linger,
        start_deadline=job.start_deadline,
        keep_ignored=setup.keep_ignored,
        replaces=job.on_failure == "replace",
    )
    streams = _streams(setup, attempt, paths)
    if streams:
        supervisor.follow(streams)
    evidence = [(fault_file(path), hang_file(path)) for path in files] if are_watched else []
    is_watched = timer_file is not None or job.hang_timeout is not None
    supervisor.keep_evidence(evidence, py_spy=_py_spy(environ) if is_watched else None)
    return group


def prepare_replacement(
    workers: Workers, supervisor: _core.Supervisor, attempt: Attempt, local_rank: int, restarts: int
) -> _core.ProcessSpec:
    """Return the process that takes the place of a worker of which nothing is left. It goes on in the files
    of its predecessor, whose error file gets another name.

    Raises:
        _core.SupervisorError: the supervisor cannot.
        OSError: that file cannot be renamed, or descriptors ran out.
    """
    setup, paths = workers.setup, attempt.paths
    if paths is None:
        raise RuntimeError("a worker is replaced that was never started")
    own = attempt.variables[local_rank]
    own["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
    own.update(_member(attempt.plan, local_rank))
    error_file = paths.error_files.get(local_rank)
    if error_file and os.path.exists(error_file):
        os.rename(error_file, error_file_of(error_file, attempt.pids[local_rank]))
    streams = [each for each in _streams(setup, attempt, paths) if each.local_rank == local_rank]
    if streams:
        supervisor.follow(streams)
    return workers.replacement(paths, local_rank, {**setup.environ, **own})


def _member(plan: Plan, local_rank: int) -> dict[str, str]:
    """What tells a worker that is a member of the rendezvous which one it is, and in whose place: that of a
    process of which nothing is left, so that nobody has to wait for the end of its lease.
    """
    if plan.members is None:
        return {}
    before = plan.members.get(local_rank)
    plan.members[local_rank] = name = os.urandom(8).hex()
    if plan.page is not None:
        plan.page.clear(local_rank)
    return {"ELASTICRS_TRAIN_MEMBER": name if before is None else f"{name} {before}"}


def _streams(setup: WorkerSetup, attempt: Attempt, paths: LogPaths) -> list[_core.LogStream]:
    streams: list[_core.LogStream] = []
    prefixes = line_prefixes(setup.prefix_template, attempt.plan.ranks)
    for to, tees, copy in (
        (1, paths.tee_stdouts, paths.filtered_stdout),
        (2, paths.tee_stderrs, paths.filtered_stderr),
    ):
        contains = [os.fsencode(text) for text in setup.filters[to - 1]] if copy else []
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
    job: JobConfig,
    plan: Plan,
    round: int,  # noqa: A002 -- the field's own word
    restarts: int,
    inherited: Mapping[str, str],
    timer_file: str | None = None,
) -> dict[int, dict[str, str]]:
    """Return what is added to the environment of each worker of an attempt, by local rank. ``inherited`` is
    what all workers have; ``round`` the number of the attempt, ``restarts`` those charged so far.
    """
    variables = {
        ranks.local_rank: worker_env(
            ranks,
            run_id=job.run_id,
            master_addr=plan.master_addr,
            master_port=plan.master_port,
            round=round,
            restarts=restarts,
            max_restarts=job.max_restarts,
            inherited=inherited,
            use_agent_store=plan.use_agent_store,
            timer_file=timer_file,
        )
        for ranks in plan.ranks
    }
    for own in variables.values():
        own.update(plan.variables)
    if job.virtual_local_rank:
        for local_rank, own in variables.items():
            own.update(virtual_local_rank(local_rank, inherited))
    return variables


def process_spec(
    local_rank: int,
    argv: Sequence[str],
    env: Mapping[str, str],
    stdout: str | None,
    stderr: str | None,
    *,
    cpus: Sequence[int] | None,
    pass_fds: Sequence[int] = (),
    warm: bool = False,
) -> _core.ProcessSpec:
    """Return one process, as the core takes it.

    Args:
        local_rank: its index in the group.
        argv: program and arguments.
        env: the whole environment.
        stdout: a file; this process's own stream if empty.
        stderr: the same.
        cpus: those that it may run on; ``None`` for those of this process.
        pass_fds: descriptors that it gets under the same numbers.
        warm: it is forked from a nursery that :func:`warm_nursery` describes.
    """
    files = {"stdout": stdout or None, "stderr": stderr or None}
    return _core.ProcessSpec(local_rank, argv, env=env, cpus=cpus, pass_fds=pass_fds, warm=warm, **files)


def warm_nursery(workers: Workers, report: int) -> _core.WarmNursery | None:
    """The nursery that imports what its workers need, and forks them; ``None`` if they start cold.

    Args:
        workers: of the job.
        report: a file in memory for what it tells.
    """
    setup, command = workers.setup, workers.warm_command
    if setup.preload is None or command is None:
        return None
    env = warm_environment(dict(setup.environ), setup.preload, os.path.abspath(_core.__file__))
    process = _core.ProcessSpec(0, command, env=env)
    return _core.WarmNursery(
        process, report_fd=report, limit=setup.job.warm_timeout, ignored=setup.keep_ignored
    )


def console_stream(local_rank: int, path: str, to: int, prefix: str) -> _core.LogStream:
    """Return a log file that the core copies to the console: 1 for standard output, 2 for standard error."""
    return _core.LogStream(local_rank, path, 1 if to == 1 else 2, os.fsencode(prefix))


def adopt(
    supervisor: _core.Supervisor,
    pids: Mapping[int, int],
    statuses: Sequence[int],
    pages: Mapping[int, int] | None = None,
) -> bool:
    """Have processes adopted that somebody else has started; False if the group has ended meanwhile.

    Args:
        supervisor: of a group that has begun.
        pids: by local rank, from 0 on.
        statuses: by local rank, the pipe into which their parent writes the exit status.
        pages: by local rank, the memory for heartbeats.

    Raises:
        ProcessLookupError: one of them has ended.
    """
    try:
        for local_rank, pid in pids.items():
            supervisor.adopt(local_rank, pid, statuses[local_rank], (pages or {}).get(local_rank))
    except _core.SupervisorError:
        return False
    return True


def end_at_once(supervisor: _core.Supervisor) -> None:
    """Kill a group."""
    supervisor.stop(_core.StopPolicy(signal.SIGKILL, 0.0))


def last_lines(path: str, count: int) -> list[str]:
    """Return the last lines of a log file, or why they cannot be had."""
    try:
        lines = _core.last_lines(path, count)
    except OSError as error:
        return [f"(the file cannot be read: {error.strerror})"]
    return [line.decode(errors="replace") for line in lines]


def heartbeat_page() -> tuple[int, str]:
    """Make a page for the heartbeats of one worker; return its descriptor, and how the worker finds it."""
    return _core.heartbeat_page()


def _py_spy(environ: Mapping[str, str]) -> str | None:
    folders = [*environ.get("PATH", os.defpath).split(os.pathsep), os.path.dirname(sys.executable)]
    paths = (os.path.join(folder, "py-spy") for folder in folders)
    return next((path for path in paths if os.access(path, os.X_OK)), None)


class CommandWorkers(Workers):
    """Workers that are programs.

    In an argument, ``${local_rank}`` is the worker's and ``$$`` is a dollar, as in torch.
    """

    def __init__(self, setup: WorkerSetup, command: Sequence[str]) -> None:
        super().__init__(setup)
        self._command = command
        if setup.preload is not None:
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
                warm=self.warm_command is not None,
            )
            for local_rank, env in environments.items()
        ]

    def return_values(self, attempt: Attempt) -> dict[int, object]:
        """Programs return nothing; torch gives ``None`` for each rank, and so do we."""
        return dict.fromkeys(attempt.global_ranks().values())


def _filled_in(argument: str, local_rank: int) -> str:
    if "$" not in argument:
        return argument
    from elasticrs.utils.api import macros  # imports `re`: only where there is something to fill in

    return str(macros.substitute([argument], str(local_rank))[0])


def directory_logs(run: RunLogs) -> Callable[[str, dict[int, dict[str, str]]], LogPaths]:
    """Return the layout of the command line, in the directory of a run."""

    def attempt_logs(name: str, variables: dict[int, dict[str, str]]) -> LogPaths:
        paths = run.attempt(name)
        for local_rank, own in variables.items():
            own["TORCHELASTIC_ERROR_FILE"] = paths.error_files[local_rank]
        return paths

    return attempt_logs
