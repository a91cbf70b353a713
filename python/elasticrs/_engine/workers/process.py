"""Describe worker processes for the supervisor, and let the supervisor take over or kill running workers.
:class:`macros` substitutes the workers' arguments.
"""

from __future__ import annotations

import os
import signal

from elasticrs import _core
from elasticrs._engine.workers.followers import follower_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

SupervisorError = _core.SupervisorError
"""Raised when the supervisor itself has failed."""


def check_limits(
    nproc: int, hang_timeout: float | str | None, environ: Mapping[str, str], followed: int = 0
) -> None:
    """Check that the limits on processes and open files are high enough. Call this before any process is
    started. ``followed`` is the number of log files that the agent opens.

    Raises:
        ValueError: a limit does not allow this number of processes or file descriptors.
    """
    # Each worker needs one file descriptor for its shared memory page of heartbeats, and a second descriptor
    # during startup.
    pages = 2 * nproc if hang_timeout is not None else 0
    # The FIFO needs two descriptors, for reading and writing. Each process with a timer needs a pidfd, and
    # one such process per worker is assumed.
    timers = nproc + 2 if environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1" else 0
    _core.check_limits(nproc, followed, pages + timers)


def raise_descriptor_limit() -> None:
    """Raise this process's soft limit on open file descriptors. Workers still start with the previous limit,
    but other child processes inherit the new one.
    """
    _core.raise_descriptor_limit()


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
    """Return a process specification to pass to the core.

    Args:
        local_rank: index of the process in its group.
        argv: program and arguments.
        env: complete environment.
        stdout: path of a file for standard output; this process's standard output if empty or ``None``.
        stderr: path of a file for standard error; this process's standard error if empty or ``None``.
        cpus: CPUs that the process may use; this process's CPUs if ``None``.
        pass_fds: file descriptors that the process inherits under the same numbers.
        warm: true to fork the process from a warm nursery.
    """
    if not warm and (follower := follower_of(argv)) is not None:
        follower.started()
        argv = follower.command
    files = {"stdout": stdout or None, "stderr": stderr or None}
    return _core.ProcessSpec(local_rank, argv, env=env, cpus=cpus, pass_fds=pass_fds, warm=warm, **files)


def console_stream(local_rank: int, path: str, to: int, prefix: str) -> _core.LogStream:
    """Describe a log file that the core copies to standard output if ``to`` is 1, or to standard error if it
    is 2.
    """
    return _core.LogStream(local_rank, path, 1 if to == 1 else 2, os.fsencode(prefix))


def adopt(
    supervisor: _core.Supervisor,
    pids: Mapping[int, int],
    statuses: Sequence[int],
    pages: Mapping[int, int] | None = None,
) -> bool:
    """Make the supervisor monitor existing processes. Return false if the supervisor's group has ended.

    Args:
        supervisor: supervisor of a group that has been started.
        pids: pids by local rank, starting with 0.
        statuses: pipes, by local rank, into which the parent writes the exit statuses.
        pages: file descriptors of heartbeat pages, by local rank.

    Raises:
        ProcessLookupError: a process has already exited.
    """
    try:
        for local_rank, pid in pids.items():
            supervisor.adopt(local_rank, pid, statuses[local_rank], (pages or {}).get(local_rank))
    except _core.SupervisorError:
        return False
    return True


def end_at_once(supervisor: _core.Supervisor) -> None:
    supervisor.stop(_core.StopPolicy(signal.SIGKILL, 0.0))


def heartbeat_page() -> tuple[int, str]:
    """Create a heartbeat page (shared memory) for a worker. Return its file descriptor, and the value of the
    environment variable that tells the worker where it is.
    """
    return _core.heartbeat_page()


class macros:  # noqa: N801 -- torch's name
    """Macros that are substituted in workers' arguments."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: list[Any], local_rank: str) -> list[Any]:
        """Return the arguments with ``${local_rank}`` replaced. Leave other macros, and arguments that are
        not strings, unchanged.

        Args:
            args: arguments of a worker.
            local_rank: local rank of that worker.
        """
        from string import Template  # loads re, which other launches need not

        return [
            Template(arg).safe_substitute(local_rank=local_rank) if isinstance(arg, str) else arg
            for arg in args
        ]
