"""Run a program as a worker, and clean up its descendants."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from elasticrs._engine.gpus.numa import cpus_of_options
from elasticrs._engine.workers.functions.supervised_group import SupervisedGroup, SupervisedProcess
from elasticrs._engine.workers.process import process_spec

if TYPE_CHECKING:
    from elasticrs._engine.gpus.numa import NumaOptions

__all__ = ["SubprocessHandler"]


class SubprocessHandler:
    """Runs a program in a new session, and kills its descendants when it exits.

    Unlike in torch, output is appended to files, and ``proc`` has only :class:`subprocess.Popen`'s ``pid``,
    ``poll``, ``wait``, ``returncode`` and ``send_signal``. Deleting this object kills remaining processes.

    Args:
        entrypoint: path or name of the program. ``RuntimeError`` is raised if it cannot be started.
        args: arguments, which are converted to strings.
        env: variables that are added to the environment of this process.
        stdout: path of a file for standard output; this process's standard output if empty or ``None``.
        stderr: the same for standard error.
        local_rank_id: local rank of the program.
        numa_options: binding of the program to CPUs.
    """

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
        argv = [entrypoint, *map(str, args)]
        cpus = cpus_of_options(numa_options, local_rank_id + 1)
        own_cpus = None if cpus is None else cpus[local_rank_id]
        spec = process_spec(0, argv, {**os.environ, **env}, stdout, stderr, cpus=own_cpus)
        self._group = SupervisedGroup()
        try:
            self._group.start([spec])
        except BaseException:
            self._group.close()
            raise
        self.proc = SupervisedProcess(self._group, 0, argv, is_alone=True)

    @classmethod
    def of_group(cls, group: SupervisedGroup, local_rank: int, argv: list[str]) -> SubprocessHandler:
        """Return a handler for one process of a group that is already running."""
        handler = cls.__new__(cls)
        handler.local_rank_id = local_rank
        handler._group = group
        handler.proc = SupervisedProcess(group, local_rank, argv)
        return handler

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal (SIGTERM if ``None``) to the program's process group, without waiting."""
        self.proc.send_signal(death_sig or signal.SIGTERM)
