"""Workers that run a Python function or a Python script, with any start method of multiprocessing.

The agent's loop never blocks to wait for a :mod:`keeper <.keeper>`, which is the workers' parent process.
Events report its progress and exit.
"""

from __future__ import annotations

import os
import pickle
import select
import sys
from enum import IntEnum, auto
from multiprocessing import resource_tracker, spawn
from typing import TYPE_CHECKING, Any

from elasticrs._engine.inside.run_path import run_script_path
from elasticrs._engine.supervise.run.workers import Leftovers, Workers
from elasticrs._engine.workers.event_log import Adopted
from elasticrs._engine.workers.functions import keeper
from elasticrs._engine.workers.functions.function_process import command_line
from elasticrs._engine.workers.functions.start_methods import BY_METHOD, PATIENCE, ForkedByKeeper, Functions
from elasticrs._engine.workers.process import (
    adopt,
    end_at_once,
    follower_of,
    heartbeat_page,
    is_script_file,
    macros,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elasticrs._core import ProcessSpec, Supervisor
    from elasticrs._engine.supervise.attempt import Attempt
    from elasticrs._engine.supervise.run.workers import WorkerSetup
    from elasticrs._engine.workers.functions.start_methods import FunctionStart
    from elasticrs._engine.workers.logs import LogPaths

_HEARTBEAT = "ELASTICRS_HEARTBEAT"
_TRACKER_TIME = 1.0


def function_workers(
    setup: WorkerSetup,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    start_method: str,
    *,
    is_script: bool = False,
) -> FunctionWorkers:
    """Create workers that call a function, which must be importable by name, except with ``fork``."""
    kind = KeptWorkers if BY_METHOD[start_method].has_keeper else FunctionWorkers
    return kind(setup, function, arguments, start_method, is_script=is_script)


def script_workers(setup: WorkerSetup, script: Sequence[str], start_method: str) -> FunctionWorkers:
    """Create workers that run a script. Call this only in a process that runs nothing but the launcher."""
    return function_workers(setup, run_script_path, script, start_method, is_script=True)


class FunctionWorkers(Workers):
    def __init__(
        self,
        setup: WorkerSetup,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        start_method: str,
        *,
        is_script: bool,
    ) -> None:
        super().__init__(setup)
        self._function = function
        self._arguments = list(arguments)
        self._start_method = start_method
        self._is_script = is_script
        # A profiler may have replaced ``sys.executable`` with a script of its own. It does not follow the
        # workers, because ``multiprocessing`` starts them with the interpreter that it remembers.
        if sys.executable != os.fsdecode(spawn.get_executable()) and is_script_file(sys.executable):
            self.unfollowed = sys.executable
        if not BY_METHOD[start_method].has_keeper:
            command = command_line(0, 0)
            self.follower = follower_of(command)
            if setup.preload is not None and self.follower is None:
                self.warm_command = command
        self._start: FunctionStart | None = None
        # Starts of replacement workers, by local rank.
        self._late: dict[int, FunctionStart] = {}
        # Pickled return values, by local rank.
        self._values: dict[int, bytes] = {}
        # Descriptors of the heartbeat pages, by local rank. Empty if the Rust core creates the pages.
        self._pages: dict[int, int] = {}

    def specs(self, paths: LogPaths, environments: Mapping[int, dict[str, str]]) -> list[ProcessSpec]:
        # Forget the values of the previous attempt, because ranks may have changed.
        self._values = {}
        self._start = self._start_of(paths, environments)
        return self._start.prepare()

    def _start_of(self, paths: LogPaths, environments: Mapping[int, dict[str, str]]) -> FunctionStart:
        functions = Functions(
            self.setup.job.name,
            self._function,
            {rank: tuple(macros.substitute(self._arguments, str(rank))) for rank in environments},
            environments,
            {rank: paths.stdouts.get(rank, "") for rank in environments},
            {rank: paths.stderrs.get(rank, "") for rank in environments},
            self.setup.job.cpus,
            {rank: (page,) for rank, page in self._pages.items()},
            self.are_warm,
        )
        return BY_METHOD[self._start_method](functions)

    def replacement(self, paths: LogPaths, local_rank: int, environ: dict[str, str]) -> ProcessSpec:
        if (before := self._late.pop(local_rank, None)) is not None:
            before.close()
        self._late[local_rank] = late = self._start_of(paths, {local_rank: environ})
        (process,) = late.prepare()
        return process

    def replaced(self, supervisor: Supervisor, local_rank: int) -> None:
        self._late[local_rank].watch(supervisor)

    def _starts(self) -> list[FunctionStart]:
        return [each for each in (self._start, *self._late.values()) if each is not None]

    def started(self, supervisor: Supervisor, attempt: Attempt) -> None:  # noqa: ARG002
        if self._start is not None:
            self._start.watch(supervisor)

    def fd_ready(self, supervisor: Supervisor, fd: int) -> None:  # noqa: ARG002
        for start in self._starts():
            start.fd_ready(fd)

    def ended(self, supervisor: Supervisor, *, has_succeeded: bool = False) -> None:  # noqa: ARG002
        """Read the remaining return values and release the resources of the workers."""
        self._read_out()
        for start in self._starts():
            start.close()
        self._late.clear()
        self.leftovers = Leftovers(silent=self._silent())

    def _read_out(self) -> None:
        for start in self._starts():
            if start.watcher is not None:
                start.read_out()
                self._values.update((rank, bytes(data)) for rank, data in start.values.items())

    def _silent(self) -> list[int]:
        """Return the local ranks that exited with 0 before their function returned (``os._exit``)."""
        return [] if self._is_script else [rank for rank, data in self._values.items() if not data]

    def close(self) -> None:
        """Also stop multiprocessing's resource tracker, which would outlive a launcher of scripts."""
        for start in self._starts():
            # With a watcher, `start.close` would use the supervisor, which is already closed.
            start.watcher = None
            start.close()
        self._start = None
        self._late.clear()
        if self._is_script:
            stop_tracker()

    def return_values(self, attempt: Attempt) -> dict[int, object]:
        """Return the functions' return values by global rank. Unpickling may raise any exception."""
        ranks = attempt.global_ranks()
        if self._is_script:
            return dict.fromkeys(ranks.values())
        return {ranks[rank]: pickle.loads(data) for rank, data in self._values.items()}


class _Phase(IntEnum):
    PREPARED = auto()
    """The keeper has been started and has not forked the workers yet."""
    STARTING = auto()
    """The core's process group has started and is still empty."""
    RUNNING = auto()
    """The process group has adopted the workers."""
    SUCCEEDED = auto()
    """The workers have succeeded. Their leftover processes are exiting, or may continue for a while."""
    ENDING = auto()
    """The process group has stopped without success. The keeper is killing the leftover processes."""
    ABANDONED = auto()
    """The group was stopped before the workers started. The keeper may still import modules."""


class KeptWorkers(FunctionWorkers):
    """Workers whose parent is a keeper process. They run only once the Rust core monitors them."""

    _phase = _Phase.PREPARED
    _was_stopped = False
    _supervisor: Supervisor | None = None
    _attempt: Attempt | None = None
    _why_not_started: str | None = None

    def specs(self, paths: LogPaths, environments: Mapping[int, dict[str, str]]) -> list[ProcessSpec]:
        self._phase, self._was_stopped = _Phase.PREPARED, False
        self.are_started, self._why_not_started, self.leftovers = False, None, None
        if self.setup.job.hang_timeout is not None:
            environments = {rank: dict(environment) for rank, environment in environments.items()}
            for rank, environment in environments.items():
                self._pages[rank], environment[_HEARTBEAT] = heartbeat_page()
        return super().specs(paths, environments)

    @property
    def _kept(self) -> ForkedByKeeper | None:
        return self._start if isinstance(self._start, ForkedByKeeper) else None

    def started(self, supervisor: Supervisor, attempt: Attempt) -> None:
        self._supervisor, self._attempt = supervisor, attempt
        if self._kept is not None:
            self._phase = _Phase.STARTING
            supervisor.watch_fd(self._kept.control)

    def fd_ready(self, supervisor: Supervisor, fd: int) -> None:
        """Handle news: the workers have started, their parent has exited, or a return value has arrived."""
        kept = self._kept
        if kept is None:
            return
        if self._phase is _Phase.STARTING and fd == kept.control:
            self._take_in(supervisor, kept)
        elif self._phase > _Phase.RUNNING and fd == kept.keeper_pidfd:
            supervisor.unwatch_fd(fd)
            self._finish(kept)
        else:
            kept.fd_ready(fd)

    def _take_in(self, supervisor: Supervisor, kept: ForkedByKeeper) -> None:
        """Add the workers to the supervised process group, and then let the workers run."""
        attempt = self._attempt
        if attempt is None or self._was_stopped:
            # Do not let the workers run after a stop request. A later event reports the process group's end.
            supervisor.unwatch_fd(kept.control)
            return
        try:
            pids = kept.take_pids()
            if pids is None:
                return
            supervisor.unwatch_fd(kept.control)
            if not adopt(supervisor, pids, kept.statuses, self._pages):
                return  # The group has already ended, which a later event will report.
        except (OSError, RuntimeError) as error:
            supervisor.unwatch_fd(kept.control)
            self._why_not_started = f"the workers could not be started: {error}"
            end_at_once(supervisor)
            return
        attempt.append(Adopted(list(pids.values())))
        kept.watch(supervisor)
        self._phase, self.are_started = _Phase.RUNNING, True

    def stop(self) -> None:
        """Abandon workers that have not been started yet, and kill lingering processes at once.
        A second call does not wait for a keeper without workers, because its imports may hang in the kernel.
        """
        kept, was_stopped, self._was_stopped = self._kept, self._was_stopped, True
        if kept is None or self._phase <= _Phase.RUNNING:
            return
        if was_stopped and self._phase is _Phase.ABANDONED and self._supervisor is not None:
            self._supervisor.unwatch_fd(kept.keeper_pidfd)
            self._finish(kept, 0.0)
        else:
            kept.begin_end(keeper.AT_ONCE)

    def ended(self, supervisor: Supervisor, *, has_succeeded: bool = False) -> None:
        self._read_out()
        self._close_pages()
        kept = self._kept
        if kept is None:
            self.leftovers = Leftovers()
        elif self._phase is _Phase.PREPARED:
            # The core does not monitor these workers, so it will not report their exits.
            kept.begin_end(keeper.AT_ONCE)
            self._finish(kept)
        else:
            linger: float | None = keeper.AT_ONCE
            if self._phase is _Phase.STARTING:
                supervisor.unwatch_fd(kept.control)
                self._phase = _Phase.ABANDONED
            elif has_succeeded:
                self._phase = _Phase.SUCCEEDED
                # Kill leftover processes at once if a stop was requested, even if the workers succeeded.
                linger = keeper.AT_ONCE if self._was_stopped else self.setup.job.linger
            else:
                self._phase = _Phase.ENDING
            kept.begin_end(keeper.LEAVE if linger is None else linger)
            supervisor.watch_fd(kept.keeper_pidfd)

    def _finish(self, kept: ForkedByKeeper, patience: float = PATIENCE) -> None:
        self._start = self._supervisor = None
        kept.finish(patience)
        was_stopped = self._phase is _Phase.SUCCEEDED and self._was_stopped
        self.leftovers = Leftovers(
            *(kept.ended, kept.more_ended),
            was_stopped=was_stopped,
            silent=self._silent(),
            why_not_started=self._why_not_started,
        )

    def close(self) -> None:
        self._close_pages()
        self._supervisor = None
        super().close()

    def _close_pages(self) -> None:
        while self._pages:
            os.close(self._pages.popitem()[1])


def stop_tracker() -> None:
    """Stop multiprocessing's resource tracker. Call this only in a launcher's process.
    The tracker exits when every copy of its pipe is closed. If a worker's descendant holds one, do not wait
    for it.
    """
    tracker: Any = resource_tracker._resource_tracker
    pid, fd = tracker._pid, tracker._fd
    if pid is None or fd is None:
        return
    tracker._pid = tracker._fd = None
    os.close(fd)
    pidfd = os.pidfd_open(pid)
    try:
        if select.select([pidfd], [], [], _TRACKER_TIME)[0]:
            os.waitpid(pid, 0)
    finally:
        os.close(pidfd)
