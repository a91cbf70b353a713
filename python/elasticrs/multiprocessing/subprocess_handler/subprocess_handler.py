"""Runs a program as a worker. Users may extend the class, so its methods and attributes are as in torch."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from elasticrs._engine.gpus.numa import cpus_of_options
from elasticrs._engine.workers.functions.supervised_group import SupervisedGroup, SupervisedProcess
from elasticrs._engine.workers.process import process_spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import BinaryIO

    from elasticrs._engine.gpus.numa import NumaOptions

__all__ = ["SubprocessHandler"]


class SubprocessHandler:
    """Runs a program in a new session, and kills its descendants when it exits.

    Deleting this object kills remaining processes. Unlike in torch, output is appended to files, and ``proc``
    has only :class:`subprocess.Popen`'s ``pid``, ``args``, ``poll``, ``wait``, ``returncode``,
    ``send_signal``, ``terminate`` and ``kill``. Subclasses may override ``close`` and ``_popen``, which
    starts the program and returns any object like :class:`subprocess.Popen`.

    Args:
        entrypoint: path or name of the program. ``RuntimeError`` is raised if it cannot be started.
        args: arguments, which are converted to strings.
        env: variables that are added to the environment of this process.
        stdout: path of a file for standard output; this process's standard output if empty or ``None``.
        stderr: the same for standard error.
        local_rank_id: local rank of the program.
        numa_options: binding of the program to CPUs.
    """

    proc: Any
    """Process with the methods of :class:`subprocess.Popen`."""

    def __init__(
        self,
        entrypoint: str,
        args: tuple[Any, ...],
        env: dict[str, str],
        stdout: str | None,
        stderr: str | None,
        local_rank_id: int,
        numa_options: NumaOptions | None = None,
    ) -> None:
        self.local_rank_id = local_rank_id
        cpus = cpus_of_options(numa_options, local_rank_id + 1)
        self._cpus = None if cpus is None else cpus[local_rank_id]
        with ExitStack() as files, _on_cpus(self._cpus):
            self._stdout, self._stderr = (
                files.enter_context(open(path, "ab")) if path else None for path in (stdout, stderr)
            )
            self.proc = self._popen((entrypoint, *map(str, args)), {**os.environ, **env})

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        spec = process_spec(0, list(args), env, _path(self._stdout), _path(self._stderr), cpus=self._cpus)
        group = SupervisedGroup()
        try:
            group.start([spec])
        except BaseException:
            group.close()
            raise
        return SupervisedProcess(group, 0, args, is_alone=True)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal (SIGTERM if ``None``) to the program's process group, without waiting."""
        signum = death_sig or signal.SIGTERM
        if isinstance(self.proc, SupervisedProcess):
            self.proc.send_signal(signum)
        elif self.proc.poll() is None:
            try:
                os.killpg(self.proc.pid, signum)
            except ProcessLookupError:  # A subclass has not given the program its own process group.
                self.proc.send_signal(signum)


class GroupMember(SubprocessHandler):
    """Handler for one of several processes that were started together and are already running."""

    def __init__(self, group: SupervisedGroup, local_rank: int, argv: Sequence[str]) -> None:
        self.local_rank_id = local_rank
        self.proc = SupervisedProcess(group, local_rank, argv)


def _path(file: BinaryIO | None) -> str | None:
    return None if file is None else file.name


@contextmanager
def _on_cpus(cpus: Sequence[int] | None) -> Iterator[None]:
    """Bind this thread to CPUs in a ``with`` block, so that processes started there inherit the binding."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
