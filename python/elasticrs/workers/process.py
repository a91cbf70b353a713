"""Processes of the workers as the core takes them: their description, adoption, and end."""

from __future__ import annotations

import os
import signal

from elasticrs import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SupervisorError = _core.SupervisorError
"""The supervisor itself failed."""


def check_limits(
    nproc: int, hang_timeout: float | str | None, environ: Mapping[str, str], followed: int = 0
) -> None:
    """Check the machine's limits before anything is started. ``followed`` is the number of log files that the
    agent reads.

    Raises:
        ValueError: a limit does not allow that many processes or descriptors.
    """
    # One heartbeat page for each worker, and a second descriptor of it while workers are being started.
    pages = 2 * nproc if hang_timeout is not None else 0
    # Two descriptors for the FIFO (reading and writing), and a pidfd for each process with a timer, assuming
    # one per worker.
    timers = nproc + 2 if environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1" else 0
    _core.check_limits(nproc, followed, pages + timers)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of file descriptors. Processes that Python itself starts inherit the new limit."""
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
    """Return the description of a process for the core.

    Args:
        local_rank: index of the process in the group.
        argv: program and arguments.
        env: complete environment.
        stdout: path of a file for standard output; this process's own stream if empty.
        stderr: the same for standard error.
        cpus: CPUs that the process may use; ``None`` for those of this process.
        pass_fds: descriptors that the process inherits under the same numbers.
        warm: true to fork the process from a nursery that :func:`warm_nursery` describes.
    """
    files = {"stdout": stdout or None, "stderr": stderr or None}
    return _core.ProcessSpec(local_rank, argv, env=env, cpus=cpus, pass_fds=pass_fds, warm=warm, **files)


def console_stream(local_rank: int, path: str, to: int, prefix: str) -> _core.LogStream:
    """Return a log file that the core copies to the console. ``to`` is 1 for standard output and 2 for
    standard error.
    """
    return _core.LogStream(local_rank, path, 1 if to == 1 else 2, os.fsencode(prefix))


def adopt(
    supervisor: _core.Supervisor,
    pids: Mapping[int, int],
    statuses: Sequence[int],
    pages: Mapping[int, int] | None = None,
) -> bool:
    """Let the core adopt processes that another process has started. Return false if the group has already
    ended.

    Args:
        supervisor: supervisor of a group that has started.
        pids: pids by local rank, from 0 on.
        statuses: pipes by local rank into which the parent writes the exit status.
        pages: heartbeat pages by local rank.

    Raises:
        ProcessLookupError: one of the processes has ended.
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
    """Create a heartbeat page for a worker. Return its descriptor, and the text by which the worker finds
    it.
    """
    return _core.heartbeat_page()
