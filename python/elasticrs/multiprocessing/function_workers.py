"""Workers of an agent that are functions, started by ``fork`` or ``forkserver``: see :mod:`.keeper`.

The loop of the agent never waits for a keeper: it may import for long before there are workers, and what they
leave behind may go on for a while. Both are told by descriptors, as everything else is.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from elasticrs import _core
from elasticrs._worker.run_path import run_script_path
from elasticrs.multiprocessing import keeper
from elasticrs.multiprocessing.function_process import FunctionWorkers, RunScripts
from elasticrs.multiprocessing.start_methods import KEPT, PATIENCE
from elasticrs.workers import Leftovers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elasticrs.agent.attempt import Attempt
    from elasticrs.logs import LogPaths
    from elasticrs.multiprocessing.start_methods import Kept
    from elasticrs.workers import WorkerSetup

_HEARTBEAT = "ELASTICRS_HEARTBEAT"


class KeptWorkers(FunctionWorkers):
    """Workers that call a function, and whose parent is a keeper.

    The group of the core starts without members, and adopts them before they begin.

    Args:
        setup: what all kinds need.
        function: with ``forkserver`` importable by name.
        arguments: for all workers the same.
        start_method: ``fork`` or ``forkserver``.
    """

    def __init__(
        self, setup: WorkerSetup, function: Callable[..., Any], arguments: Sequence[Any], start_method: str
    ) -> None:
        super().__init__(setup, function, arguments)
        self._start_method = start_method
        self._kept: Kept | None = None
        self._watches: _core.Supervisor | None = None
        self._attempt: Attempt | None = None
        self._pages: dict[int, int] = {}
        self._are_started = self._is_ending = self._has_succeeded = self._was_stopped = False
        self._why_not_started: str | None = None
        self._leftovers: Leftovers | None = None

    def specs(self, paths: LogPaths, environments: Mapping[int, dict[str, str]]) -> list[_core.ProcessSpec]:
        """See the base class: has them started, to wait until they may begin; none is for the core."""
        self._values.clear()
        self._attempt = None
        self._are_started = self._is_ending = self._has_succeeded = self._was_stopped = False
        self._why_not_started = self._leftovers = None
        own = {rank: dict(environment) for rank, environment in environments.items()}
        if self._setup.job.hang_timeout is not None:
            for rank, environment in own.items():
                self._pages[rank], environment[_HEARTBEAT] = _core.heartbeat_page()
        functions = _Functions(
            self._setup.job.name,
            self._function,
            {rank: self.arguments(rank) for rank in own},
            own,
            {rank: paths.stdouts.get(rank, "") for rank in own},
            {rank: paths.stderrs.get(rank, "") for rank in own},
        )
        self._kept = KEPT[self._start_method](functions, self._setup.job.cpus)
        self._kept.launch({rank: (page,) for rank, page in self._pages.items()})
        return []

    def started(self, supervisor: _core.Supervisor, attempt: Attempt) -> None:
        """See the base class: their keeper is on its way."""
        self._attempt = attempt
        supervisor.watch_fd(self._running().control)

    @property
    def are_started(self) -> bool:
        """See the base class."""
        return self._are_started

    @property
    def why_not_started(self) -> str | None:
        """See the base class."""
        return self._why_not_started

    def fd_ready(self, supervisor: _core.Supervisor, fd: int) -> None:
        """See the base class: the keeper tells of the workers, or has ended."""
        kept = self._kept
        if kept is None:
            return
        if self._is_ending:
            if fd == kept.keeper_pidfd:
                supervisor.unwatch_fd(fd)
                self._finish(kept)
        elif not self._are_started and fd == kept.control:
            self._take_in(supervisor, kept)
        else:
            super().fd_ready(supervisor, fd)

    def _take_in(self, supervisor: _core.Supervisor, kept: Kept) -> None:
        """Have them adopted, and let them begin."""
        attempt = self._attempt
        if attempt is None or self._was_stopped:
            # The end of the group is told next.
            supervisor.unwatch_fd(kept.control)
            return
        try:
            pids = kept.take_pids()
            if pids is None:
                return
            supervisor.unwatch_fd(kept.control)
            for rank, pid in sorted(pids.items()):
                supervisor.adopt(rank, pid, kept.statuses[rank], self._pages.get(rank))
        except _core.SupervisorError:
            return  # The group has ended meanwhile, which is told next.
        except (OSError, RuntimeError) as error:
            supervisor.unwatch_fd(kept.control)
            self._why_not_started = f"the workers could not be started: {error}"
            supervisor.stop(_core.StopPolicy(signal.SIGKILL, 0.0))
            return
        attempt.pids = [pids[rank] for rank in sorted(pids)]
        self._results = dict(kept.pipes)
        super().started(supervisor, attempt)
        self._are_started = True
        kept.let_begin()

    def stop(self) -> None:
        """See the base class: what is not there yet is not wanted, and what may go on for a while no more.

        Asked again, it does not wait for a keeper without workers, whose imports may hang in the kernel.
        """
        kept, was_stopped, self._was_stopped = self._kept, self._was_stopped, True
        if kept is not None and self._is_ending:
            if was_stopped and not self._are_started and self._watches is not None:
                self._watches.unwatch_fd(kept.keeper_pidfd)
                self._finish(kept, 0.0)
            else:
                kept.begin_end(keeper.AT_ONCE)

    def ended(self, supervisor: _core.Supervisor, attempt: Attempt, *, has_succeeded: bool = False) -> None:
        """Read what is left, and have ended what they have left behind."""
        super().ended(supervisor, attempt)
        self._close_pages()
        kept = self._kept
        if kept is None:
            self._leftovers = Leftovers()
        elif self._attempt is None:
            # Nothing of it was told, so nothing more will be asked.
            kept.begin_end(keeper.AT_ONCE)
            self._finish(kept)
        else:
            if not self._are_started:
                supervisor.unwatch_fd(kept.control)
            # The core may have told of the end before it was told to stop.
            may_linger = has_succeeded and self._are_started and not self._was_stopped
            linger = self._setup.job.linger if may_linger else keeper.AT_ONCE
            kept.begin_end(keeper.LEAVE if linger is None else linger)
            self._is_ending, self._has_succeeded = True, has_succeeded
            self._watches = supervisor
            supervisor.watch_fd(kept.keeper_pidfd)

    def _finish(self, kept: Kept, patience: float = PATIENCE) -> None:
        self._kept = None
        kept.finish(patience)
        was_stopped = self._has_succeeded and self._was_stopped
        self._leftovers = Leftovers(kept.ended, kept.more_ended, was_stopped=was_stopped)

    @property
    def leftovers(self) -> Leftovers | None:
        """See the base class."""
        return self._leftovers

    def close(self) -> None:
        """See the base class."""
        kept, self._kept = self._kept, None
        if kept is not None:
            # These pipes are its own.
            self._results.clear()
            kept.begin_end(keeper.AT_ONCE)
            kept.finish()
        self._close_pages()
        super().close()

    def _close_pages(self) -> None:
        while self._pages:
            os.close(self._pages.popitem()[1])

    def _running(self) -> Kept:
        if self._kept is None:
            raise AssertionError("`specs` comes first")
        return self._kept


class KeptScriptWorkers(RunScripts, KeptWorkers):
    """Those that run a script, in a process that is ours alone.

    Args:
        setup: what all kinds need.
        script: its path, and its arguments.
        start_method: ``fork`` or ``forkserver``.
    """

    def __init__(self, setup: WorkerSetup, script: Sequence[str], start_method: str) -> None:
        super().__init__(setup, run_script_path, script, start_method)


class _Functions:
    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        stdouts: dict[int, str],
        stderrs: dict[int, str],
    ) -> None:
        self.name = name
        self.nprocs = len(args)
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.stdouts = stdouts
        self.stderrs = stderrs
