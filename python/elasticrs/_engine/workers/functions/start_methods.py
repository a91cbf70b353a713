"""Run functions in separate processes, with the start methods ``spawn``, ``fork`` and ``forkserver``."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import warnings
from abc import ABC, abstractmethod
from contextlib import suppress
from multiprocessing import forkserver, spawn, util
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from elasticrs._engine.inside.hook.sitecustomize import follow_imports
from elasticrs._engine.job.value import Value, fresh
from elasticrs._engine.workers.functions import keeper
from elasticrs._engine.workers.functions.function_process import (
    PreparedFunction,
    ReturnPipe,
    call_and_return,
    close_all,
)
from elasticrs._engine.workers.functions.supervised_group import has_ended
from elasticrs._engine.workers.plan import TOKEN_VARIABLE
from elasticrs._engine.workers.process import process_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.process import BaseProcess

    from elasticrs._core import ProcessSpec
    from elasticrs._engine.workers.functions.supervised_group import SupervisedGroup


_MOST_SAID = 1 << 16

PATIENCE = 30.0
"""Seconds to wait for the exit of a keeper (the process that forks the workers). The keeper itself waits less
for its processes.
"""


class Functions(Value):
    """Functions to start together, by local rank, with complete environments. A stream whose path is empty is
    not redirected. ``keeps`` has further file descriptors that the processes inherit, except with ``spawn``.
    ``warm`` (a fork from a process with preloaded modules) requires ``spawn``.
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[int, tuple[Any, ...]]
    envs: Mapping[int, dict[str, str]]
    stdouts: Mapping[int, str]
    stderrs: Mapping[int, str]
    cpus: Sequence[Sequence[int]] | None = None
    keeps: Mapping[int, Sequence[int]] = fresh(factory=dict)
    warm: bool = False

    def cpus_of(self, rank: int) -> Sequence[int] | None:
        return None if self.cpus is None else self.cpus[rank]


class Watcher(Protocol):
    def watch_fd(self, fd: int) -> None: ...
    def unwatch_fd(self, fd: int) -> None: ...


class FunctionStart(ABC):
    """Base class of the start methods. An object starts functions once, and reads their return values. If
    ``has_keeper``, the parent of the functions' processes is a :mod:`keeper <.keeper>` (a process that forks
    them). Otherwise, the core (the Rust extension) starts the processes.
    """

    has_keeper: ClassVar[bool] = False

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._pipes: dict[int, ReturnPipe] = {}
        self._prepared: list[PreparedFunction] = []
        self.watcher: Watcher | None = None

    @property
    def values(self) -> dict[int, bytearray]:
        """Pickled return values by local rank. A value is empty as long as its function has not returned."""
        return {rank: pipe.data for rank, pipe in self._pipes.items()}

    @abstractmethod
    def prepare(self) -> list[ProcessSpec]:
        """Prepare the processes. Return the specifications of the processes that the core must start."""

    def run_in(self, group: SupervisedGroup) -> None:
        """Let the functions run, after ``group`` has started the processes that :meth:`prepare` returned."""
        self.watch(group)

    def watch(self, watcher: Watcher) -> None:
        """Let ``watcher`` wait for return values, once all functions run. It must call :meth:`fd_ready`."""
        for prepared in self._prepared:
            prepared.close_childs_ends()
        self.watcher = watcher
        for pipe in self._pipes.values():
            pipe.close_writer()
            watcher.watch_fd(pipe.reader)

    def fd_ready(self, fd: int) -> None:
        for pipe in self._pipes.values():
            if pipe.reader == fd and pipe.read():
                self._close(pipe)

    def read_out(self) -> None:
        for pipe in self._pipes.values():
            if pipe.reader != -1:
                while pipe.read() is None:
                    continue
                self._close(pipe)
        self.watcher = None

    def _close(self, pipe: ReturnPipe) -> None:
        if self.watcher is not None:
            self.watcher.unwatch_fd(pipe.reader)
        pipe.close()

    def close(self) -> None:
        self.read_out()
        while self._prepared:
            self._prepared.pop().close()

    def _ranks(self) -> Sequence[int]:
        return sorted(self._functions.arguments)

    def _open_pipes(self) -> None:
        for rank in self._ranks():
            self._pipes[rank] = ReturnPipe()

    def _prepare(self, rank: int) -> PreparedFunction:
        functions = self._functions
        result, name = self._pipes[rank].writer, f"{functions.name}:{rank}"
        prepared = PreparedFunction(functions.function, functions.arguments[rank], result, name)
        self._prepared.append(prepared)
        return prepared


class Spawn(FunctionStart):
    """Runs each function in a new interpreter, which the core starts like any other program."""

    def prepare(self) -> list[ProcessSpec]:
        self._open_pipes()
        functions, specs = self._functions, []
        for rank in self._ranks():
            prepared = self._prepare(rank)
            files = (functions.stdouts[rank], functions.stderrs[rank])
            how: Any = {"cpus": functions.cpus_of(rank), "pass_fds": prepared.fds, "warm": functions.warm}
            specs.append(process_spec(rank, prepared.argv, functions.envs[rank], *files, **how))
        return specs


class ForkedByKeeper(FunctionStart):
    """Start method in which a :mod:`keeper <.keeper>` forks the functions' processes and is their parent. It
    writes their exit statuses to the pipes ``statuses`` (by local rank). ``keeper_pidfd`` becomes readable
    when the keeper and all its processes have exited. :meth:`finish` stores which processes the keeper had to
    kill: ``ended`` has pid and name of the first ones, and ``more_ended`` is the number of the others.
    """

    has_keeper = True

    def __init__(self, functions: Functions) -> None:
        super().__init__(functions)
        self._group: SupervisedGroup | None = None
        self.statuses: list[int] = []
        self._control: socket.socket | None = None
        self._keeper: int | None = None
        self.keeper_pidfd = -1
        self._has_told_pids = False
        self._gate = -1
        self._ours: list[int] = []
        self.ended: list[tuple[int, str]] = []
        self.more_ended = 0

    @abstractmethod
    def _start_keeper(self, statuses: list[int], control: int, gate: int) -> int:
        """Start the keeper, which gets its ends of the pipes and of the socket. Return its pid."""

    def prepare(self) -> list[ProcessSpec]:
        """Start the keeper, whose workers then wait. Return an empty list, because the core need not start a
        process.
        """
        ends: list[int] = []
        try:
            self._open_pipes()
            # This type of socket preserves message boundaries, so each read returns a whole message.
            self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            ends.append(theirs.detach())
            gate_reader, self._gate = self._pipe(ends)
            self._ours.append(self._gate)
            statuses: list[int] = []
            for _ in self._ranks():
                reader, writer = self._pipe(ends, reads=False)
                statuses.append(writer)
                self.statuses.append(reader)
            # Fork before this process starts threads, because a fork copies the locks that threads hold.
            self._keeper = self._start_keeper(statuses, ends[0], gate_reader)
            self.keeper_pidfd = os.pidfd_open(self._keeper)
        finally:
            close_all(ends)
        return []

    @property
    def control(self) -> int:
        return self._socket().fileno()

    def take_pids(self) -> dict[int, int] | None:
        """Return the pids by local rank, or ``None`` if the keeper has not sent them yet. Never blocks. Raise
        ``RuntimeError`` if the processes could not be started.
        """
        told = struct.Struct(f"{len(self._ranks())}i")
        try:
            said = self._socket().recv(told.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            said = b""
        if not said:
            raise RuntimeError("their parent process has exited; see its stderr")
        pids = told.unpack(said)
        if not all(pids):
            raise RuntimeError("a process exited before it could run its function; see its stderr")
        self._has_told_pids = True
        return dict(enumerate(pids))

    def watch(self, watcher: Watcher) -> None:
        """Let the workers call their functions. Until now they waited, because the core did not monitor all
        of them yet.
        """
        super().watch(watcher)
        os.write(self._gate, keeper.GO * len(self._pipes))

    def _pipe(self, ends: list[int], *, reads: bool = True) -> tuple[int, int]:
        reader, writer = os.pipe()
        ends.append(reader if reads else writer)
        return reader, writer

    def run_in(self, group: SupervisedGroup) -> None:
        self._group = group
        group.watch_fd(self.control)
        try:
            # Wait without a time limit, because the keeper's imports may take a long time.
            group.wait_until(lambda: self.watcher is not None or group.has_ended)
            if self.watcher is None:
                raise RuntimeError("their supervisor has ended")
        except RuntimeError as error:
            raise RuntimeError(f"the processes could not be started: {error}") from None
        finally:
            # If a signal ended the wait, the group is stopped, and must not take in the new workers.
            group.unwatch_fd(self.control)

    def fd_ready(self, fd: int) -> None:
        group = self._group
        if group is None or fd != self.control:
            super().fd_ready(fd)
        elif (pids := self.take_pids()) is not None:
            group.adopt(pids, self.statuses)
            self.watch(group)

    def _socket(self) -> socket.socket:
        if self._control is None:
            raise AssertionError("call `prepare` first")
        return self._control

    def close(self) -> None:
        ended = None if self._group is None else self._group.log.end
        has_succeeded = ended is not None and ended.outcome == "succeeded"
        self.begin_end(keeper.LINGER if has_succeeded else keeper.AT_ONCE)
        self.finish()

    def begin_end(self, linger: float) -> None:
        """Send a :data:`keeper.WORD`, so that the keeper ends its workers and exits. A second call kills
        processes that are still running.
        """
        if self._control is not None:
            # If the connection is broken, the keeper has exited.
            with suppress(BrokenPipeError, ConnectionResetError):
                self._control.send(keeper.WORD.pack(linger))
        if self._keeper is not None and not self._has_told_pids:
            # Interrupt the imports of the keeper, the process that forks the workers. Do not use SIGKILL,
            # because a keeper that has workers must kill them first.
            with suppress(ProcessLookupError):
                if self.keeper_pidfd != -1:
                    signal.pidfd_send_signal(self.keeper_pidfd, keeper.IMPORT_NO_MORE)
                else:
                    os.kill(self._keeper, keeper.IMPORT_NO_MORE)
                # Stop processes that the imports started. This fails if the keeper has no process group yet.
                os.killpg(self._keeper, keeper.IMPORT_NO_MORE)
        if self.keeper_pidfd != -1:
            # Resume a stopped keeper (SIGSTOP), because it can neither read messages nor exit.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.keeper_pidfd, signal.SIGCONT)

    def finish(self, patience: float = PATIENCE) -> None:
        """Wait until the keeper has exited, and release all resources. Idempotent. After ``patience``
        seconds, kill the keeper and do not wait any longer, because a keeper that hangs in the kernel cannot
        exit.
        """
        if self._keeper is not None:
            if self.keeper_pidfd == -1 or has_ended(self.keeper_pidfd, patience):
                # The program itself may already have reaped the keeper.
                with suppress(ChildProcessError):
                    os.waitpid(self._keeper, 0)
            else:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.keeper_pidfd, signal.SIGKILL)
                    os.killpg(self._keeper, signal.SIGKILL)
            self._keeper = None
        if self.keeper_pidfd != -1:
            os.close(self.keeper_pidfd)
            self.keeper_pidfd = -1
        control, self._control = self._control, None
        if control is not None:
            with control:
                if self._has_told_pids:
                    self._take_names(control)
        super().close()
        close_all(self._ours)
        close_all(self.statuses)

    def _take_names(self, control: socket.socket) -> None:
        said = b""
        with suppress(BlockingIOError, ConnectionResetError):
            said = control.recv(_MOST_SAID, socket.MSG_DONTWAIT)
        *names, more = said.decode().split("\n")[:-1] or ["0"]
        self.ended = [(int(pid), name) for pid, name in (line.split(" ", 1) for line in names)]
        self.more_ended = int(more)

    def _plan(
        self, rank: int, run: Callable[[], int], status: int, keeps: Sequence[int]
    ) -> keeper.WorkerPlan:
        functions, kept = self._functions, [*keeps, *self._functions.keeps.get(rank, ())]
        files = (functions.stdouts[rank], functions.stderrs[rank])
        return keeper.WorkerPlan(run, *files, functions.cpus_of(rank), status, kept)


class Fork(ForkedByKeeper):
    """Runs functions in forks of this process. Arguments can have any type, because they are not pickled."""

    def _start_keeper(self, statuses: list[int], control: int, gate: int) -> int:
        # `multiprocessing.parent_process()` in the workers notices by this pipe that the program has exited.
        sentinel, writer = os.pipe()
        self._ours.append(writer)
        try:
            return self._fork(self._plans(statuses, sentinel), control, gate)
        finally:
            os.close(sentinel)

    def _plans(self, statuses: list[int], sentinel: int) -> list[keeper.WorkerPlan]:
        functions = self._functions
        make: Any = multiprocessing.get_context("fork").Process
        plans: list[keeper.WorkerPlan] = []
        for rank, pipe in self._pipes.items():
            process = make(
                target=call_and_return,
                args=(functions.function, functions.arguments[rank], pipe.writer),
                name=f"{functions.name}:{rank}",
            )
            run = _RunForked(process, functions.envs[rank], sentinel)
            plans.append(self._plan(rank, run, statuses[rank], [pipe.writer]))
        return plans

    def _fork(self, workers: list[keeper.WorkerPlan], control: int, gate: int) -> int:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        parent = os.getpid()
        pid = _fork()
        if pid == 0:
            try:
                self._close_programs_ends()
                keeper.keep(workers, control, gate, parent)
            except BaseException as error:
                os.write(2, f"the functions could not be started: {error!r}\n".encode(errors="replace"))
            finally:
                keeper.exit_at_once(0)
        return pid

    def _close_programs_ends(self) -> None:
        if self._control is not None:
            self._control.close()
        close_all(self._ours)
        close_all(self.statuses)
        for pipe in self._pipes.values():
            os.close(pipe.reader)


class ForkServer(ForkedByKeeper):
    """Start method: a new interpreter imports multiprocessing's preload modules and forks each process."""

    def _start_keeper(self, statuses: list[int], control: int, gate: int) -> int:
        workers: list[keeper.WorkerPlan] = []
        passed = {control, gate, *statuses}
        for rank in self._ranks():
            prepared = self._prepare(rank)
            run = keeper.RunPrepared(self._functions.envs[rank], prepared.tracker_fd, prepared.pipe_handle)
            keeps = [fd for fd in prepared.fds if fd != prepared.tracker_fd]
            workers.append(self._plan(rank, run, statuses[rank], keeps))
            passed.update((prepared.tracker_fd, *workers[-1].keeps))
        server: Any = forkserver._forkserver
        data = spawn.get_preparation_data("ignore")
        arguments = (workers, control, gate, os.getpid())
        plan = os.memfd_create("elasticrs-fork-server")
        try:
            with open(plan, "wb", closefd=False) as file:
                preload, main_path = list(server._preload_modules), data.get("init_main_from_path")
                pickle.dump((preload, main_path, data["sys_argv"], arguments), file)
            os.lseek(plan, 0, os.SEEK_SET)
            return self._run(plan, sorted({plan, *passed}))
        finally:
            os.close(plan)
            for prepared in self._prepared:
                prepared.close_childs_ends()

    def _run(self, plan: int, passed: list[int]) -> int:
        program = os.fsdecode(spawn.get_executable())
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from elasticrs._engine.workers.functions.keeper import main; main({plan})"
        )
        flags: list[str] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        start: Any = util.spawnv_passfds
        return int(start(os.fsencode(program), [program, *flags, "-c", code], passed))


class _RunForked(Value):
    """Callable that runs a multiprocessing process object in a fork. The pipe ``sentinel`` ends when the
    program exits.
    """

    process: BaseProcess
    env: dict[str, str]
    sentinel: int

    def __call__(self) -> int:
        os.environ.pop(TOKEN_VARIABLE, None)
        os.environ.update(self.env)
        heartbeats = sys.modules.get("elasticrs._engine.inside.heartbeats")
        if heartbeats is not None:
            heartbeats.start_afresh()
        follow_imports()
        run: Callable[[int], int] = self.process._bootstrap  # type: ignore[attr-defined]
        return run(self.sentinel)


def _fork() -> int:
    # Suppress the warning about threads: the child has only one (KEEP-1) and imports nothing (KEEP-2).
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


BY_METHOD: dict[str, type[FunctionStart]] = {"spawn": Spawn, "fork": Fork, "forkserver": ForkServer}
