"""How the functions of a :class:`MultiprocessContext` get into processes of their own, by start method."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import socket
import struct
import sys
import warnings
from abc import ABC, abstractmethod
from contextlib import suppress
from multiprocessing import forkserver, spawn, util
from typing import TYPE_CHECKING, Any, Protocol

from elasticrs import _core
from elasticrs.multiprocessing import keeper
from elasticrs.multiprocessing.group import ProcessGroup, raise_pending
from elasticrs.multiprocessing.spawn import PreparedFunction, ReturnPipe, call_and_return

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.process import BaseProcess


_LOOK_FOR_SIGNALS = 0.1


class Functions(Protocol):
    """What is to be started: a :class:`MultiprocessContext`, or the workers of an attempt.

    Attributes:
        name: of the processes.
        nprocs: how many.
        entrypoint: the function.
        args: by local rank.
        envs: added to the environment, by local rank.
        stdouts: files by local rank, or empty.
        stderrs: the same.
    """

    name: str
    nprocs: int
    entrypoint: Callable[..., Any] | str
    args: dict[int, tuple[Any, ...]]
    envs: dict[int, dict[str, str]]
    stdouts: dict[int, str]
    stderrs: dict[int, str]


class FunctionStart(ABC):
    """Starts the functions of one context, and reads what they return.

    Args:
        context: whose.
        cpus: by local rank, those that it may run on.

    Attributes:
        values: by local rank, what was returned, pickled; empty for a process that has returned nothing.
    """

    def __init__(self, context: Functions, cpus: Sequence[Sequence[int]] | None) -> None:
        self._context = context
        self._cpus = cpus
        self._pipes: dict[int, ReturnPipe] = {}
        self._group: ProcessGroup | None = None
        self.values: dict[int, bytearray] = {}

    @abstractmethod
    def start(self, streams: Sequence[_core.LogStream]) -> ProcessGroup:
        """Start all of them.

        Args:
            streams: what is copied to the console meanwhile.
        """

    def _open_pipes(self) -> None:
        for rank in range(self._context.nprocs):
            pipe = self._pipes[rank] = ReturnPipe()
            self.values[rank] = pipe.data

    def _read_pipes(self, group: ProcessGroup) -> None:
        for rank, pipe in self._pipes.items():
            pipe.forget_writer()
            group.watch(pipe.reader, lambda rank=rank: self._read(rank))  # type: ignore[misc]

    def _read(self, rank: int) -> None:
        pipe = self._pipes[rank]
        if pipe.read():
            self._unwatch(pipe)
            pipe.close()

    def _unwatch(self, pipe: ReturnPipe) -> None:
        if pipe.is_watched and self._group is not None:
            self._group.unwatch(pipe.reader)

    def close(self) -> None:
        """Read what is left, and close everything. Idempotent."""
        for pipe in self._pipes.values():
            if pipe.is_open:
                while pipe.read() is None:
                    continue
                self._unwatch(pipe)
                pipe.close()


class Spawn(FunctionStart):
    """A fresh interpreter for each, started by the core like a program."""

    def __init__(self, context: Functions, cpus: Sequence[Sequence[int]] | None) -> None:
        super().__init__(context, cpus)
        self._prepared: list[PreparedFunction] = []

    def start(self, streams: Sequence[_core.LogStream]) -> ProcessGroup:
        """See the base class."""
        try:
            self._open_pipes()
            specs = [self._spec(rank) for rank in range(self._context.nprocs)]
            self._group = ProcessGroup()
            self._group.start(specs, streams)
        except BaseException:
            if self._group is not None:
                self._group.close()
            self.close()
            raise
        for prepared in self._prepared:
            prepared.forget_childs_ends()
        self._read_pipes(self._group)
        return self._group

    def _spec(self, rank: int) -> _core.ProcessSpec:
        context, pipe = self._context, self._pipes[rank]
        prepared = PreparedFunction(
            context.entrypoint,  # type: ignore[arg-type]  # a function in this kind of context
            context.args[rank],
            pipe.writer,
            f"{context.name}:{rank}",
        )
        self._prepared.append(prepared)
        return _core.ProcessSpec(
            rank,
            prepared.argv,
            env={**os.environ, **context.envs[rank]},
            stdout=context.stdouts[rank] or None,
            stderr=context.stderrs[rank] or None,
            pass_fds=sorted({*prepared.fds, pipe.writer}),
            cpus=None if self._cpus is None else self._cpus[rank],
        )

    def close(self) -> None:
        """See the base class."""
        super().close()
        while self._prepared:
            self._prepared.pop().close()


class Kept(FunctionStart):
    """Functions whose parent is a :mod:`keeper <elasticrs.multiprocessing.keeper>`."""

    def __init__(self, context: Functions, cpus: Sequence[Sequence[int]] | None) -> None:
        super().__init__(context, cpus)
        self._control: socket.socket | None = None
        self._keeper: int | None = None
        self._gate = -1
        self._ours: list[int] = []
        self._statuses: list[int] = []

    @abstractmethod
    def _start_keeper(self, statuses: list[int], control: int, gate: int) -> int:
        """Start it, and return its pid.

        Args:
            statuses: by local rank, the descriptor for the exit status.
            control: its end of the socket.
            gate: the pipe from which the workers take a byte each.
        """

    def start(self, streams: Sequence[_core.LogStream]) -> ProcessGroup:
        """See the base class."""
        try:
            pids = self.launch()
            self._group = ProcessGroup()
            self._group.adopt(pids, self._statuses, streams)
            self._read_pipes(self._group)
            self.let_begin()
        except BaseException:
            if self._group is not None:
                self._group.close()
            self.close()
            raise
        return self._group

    def launch(self) -> dict[int, int]:
        """Start all, each of which waits to begin; for who supervises them without a group of ours.

        Returns:
            The pids by local rank.

        Raises:
            RuntimeError: they could not be started.
        """
        ends: list[int] = []
        try:
            self._open_pipes()
            self._control, theirs = socket.socketpair()
            ends.append(theirs.detach())
            gate_reader, self._gate = self._pipe(ends)
            self._ours.append(self._gate)
            statuses: list[int] = []
            for _ in range(self._context.nprocs):
                reader, writer = self._pipe(ends, reads=False)
                statuses.append(writer)
                self._statuses.append(reader)
            # Before the threads of the group begin: a fork copies none of their locks.
            self._keeper = self._start_keeper(statuses, ends[0], gate_reader)
        finally:
            _close_all(ends)
        return dict(enumerate(self._pids()))

    @property
    def statuses(self) -> list[int]:
        """By local rank, the pipe into which the keeper writes the exit status."""
        return self._statuses

    @property
    def pipes(self) -> dict[int, ReturnPipe]:
        """By local rank, for the return value."""
        return self._pipes

    def let_begin(self) -> None:
        """All are supervised."""
        os.write(self._gate, keeper.GO * self._context.nprocs)

    def _pipe(self, ends: list[int], *, reads: bool = True) -> tuple[int, int]:
        """A pipe, one end of which is the keeper's."""
        reader, writer = os.pipe()
        ends.append(reader if reads else writer)
        return reader, writer

    def _pids(self) -> list[int]:
        control = self._control
        if control is None:
            raise AssertionError("the socket comes first")
        size = struct.calcsize("i") * self._context.nprocs
        said = b""
        while len(said) < size:
            # Modules that are imported first may take long.
            while not select.select([control], [], [], _LOOK_FOR_SIGNALS)[0]:
                raise_pending()
            piece = control.recv(size - len(said))
            if not piece:
                raise RuntimeError(
                    "the processes could not be started: their parent has ended; see its stderr"
                )
            said += piece
        return list(struct.unpack(f"{self._context.nprocs}i", said))

    def close(self) -> None:
        """See the base class; returns when the keeper has ended everything."""
        ended = None if self._group is None else self._group.end
        self.end(has_succeeded=ended is not None and ended.outcome == "succeeded")

    def end(self, *, has_succeeded: bool) -> None:
        """End everything, and return then.

        Args:
            has_succeeded: what the functions have left may go on for a while.
        """
        control, self._control = self._control, None
        if control is not None:
            with control, suppress(BrokenPipeError, ConnectionResetError):
                # Refused by one that was killed, and the workers with it.
                control.send(keeper.AFTER_LINGER if has_succeeded else keeper.AT_ONCE)
        if self._keeper is not None:
            # Not there when the program waits for all of its children itself, and was faster.
            with suppress(ChildProcessError):
                os.waitpid(self._keeper, 0)
            self._keeper = None
        super().close()
        _close_all(self._ours)
        _close_all(self._statuses)


class Fork(Kept):
    """Copies of this process: anything can be passed, and nothing is pickled but what is returned."""

    def _start_keeper(self, statuses: list[int], control: int, gate: int) -> int:
        context = self._context
        make: Any = multiprocessing.get_context("fork").Process
        processes = [
            make(
                target=call_and_return,
                args=(context.entrypoint, context.args[rank], self._pipes[rank].writer),
                name=f"{context.name}:{rank}",
            )
            for rank in range(context.nprocs)
        ]
        workers = [
            keeper.WorkerPlan(
                _RunForked(process, context.envs[rank]),
                context.stdouts[rank],
                context.stderrs[rank],
                None if self._cpus is None else self._cpus[rank],
                statuses[rank],
                [self._pipes[rank].writer],
            )
            for rank, process in enumerate(processes)
        ]
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        parent = os.getpid()
        pid = _fork()
        if pid == 0:
            try:
                self._forget_programs_ends()
                keeper.keep(workers, control, gate, parent)
            except BaseException as error:
                os.write(2, f"the functions could not be started: {error!r}\n".encode(errors="replace"))
            finally:
                os._exit(0)
        return pid

    def _forget_programs_ends(self) -> None:
        if self._control is not None:
            self._control.close()
        _close_all(self._ours)
        _close_all(self._statuses)
        for pipe in self._pipes.values():
            os.close(pipe.reader)


class ForkServer(Kept):
    """Copies of a fresh interpreter that has imported what multiprocessing preloads."""

    def __init__(self, context: Functions, cpus: Sequence[Sequence[int]] | None) -> None:
        super().__init__(context, cpus)
        self._prepared: list[PreparedFunction] = []

    def _start_keeper(self, statuses: list[int], control: int, gate: int) -> int:
        context = self._context
        workers: list[keeper.WorkerPlan] = []
        for rank in range(context.nprocs):
            writer = self._pipes[rank].writer
            prepared = PreparedFunction(
                context.entrypoint,  # type: ignore[arg-type]  # a function in this kind of context
                context.args[rank],
                writer,
                f"{context.name}:{rank}",
            )
            self._prepared.append(prepared)
            environment = {**os.environ, **context.envs[rank]}
            workers.append(
                keeper.WorkerPlan(
                    keeper.RunPrepared(environment, prepared.tracker_fd, prepared.pipe_handle),
                    context.stdouts[rank],
                    context.stderrs[rank],
                    None if self._cpus is None else self._cpus[rank],
                    statuses[rank],
                    sorted({writer, *prepared.fds} - {prepared.tracker_fd}),
                )
            )
        server: Any = forkserver._forkserver
        main_path = spawn.get_preparation_data("ignore").get("init_main_from_path")
        plan = os.memfd_create("elasticrs-fork-server")
        try:
            with open(plan, "wb", closefd=False) as file:
                pickle.dump(
                    (list(server._preload_modules), main_path, (workers, control, gate, os.getpid())), file
                )
            os.lseek(plan, 0, os.SEEK_SET)
            passed = {plan, control, gate, *statuses, *(fd for worker in workers for fd in worker.keeps)}
            passed.update(prepared.tracker_fd for prepared in self._prepared)
            return self._run(plan, sorted(passed))
        finally:
            os.close(plan)
            for prepared in self._prepared:
                prepared.forget_childs_ends()

    def _run(self, plan: int, passed: list[int]) -> int:
        program = os.fsdecode(spawn.get_executable())
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from elasticrs.multiprocessing.keeper import main; main({plan})"
        )
        flags: list[str] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        start: Any = util.spawnv_passfds
        return int(start(os.fsencode(program), [program, *flags, "-c", code], passed))

    def close(self) -> None:
        """See the base class."""
        super().close()
        while self._prepared:
            self._prepared.pop().close()


class _RunForked:
    """Runs a function in a copy of this process.

    Args:
        process: multiprocessing's object.
        env: added to the environment.
    """

    def __init__(self, process: BaseProcess, env: dict[str, str]) -> None:
        self._process = process
        self._env = env

    def __call__(self) -> int:
        """Run it, and return the exit code."""
        os.environ.update(self._env)
        run: Callable[[], int] = self._process._bootstrap  # type: ignore[attr-defined]
        return run()


def _fork() -> int:
    # Python 3.12 warns of threads; what KEEP-1 and KEEP-2 say holds for those of the program as well.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


KEPT: dict[str, type[Kept]] = {"fork": Fork, "forkserver": ForkServer}
"""Those with a keeper."""

START_METHODS: dict[str, type[FunctionStart]] = {"spawn": Spawn, **KEPT}
