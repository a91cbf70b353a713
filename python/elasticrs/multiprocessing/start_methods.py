"""How the functions of a :class:`MultiprocessContext` get into processes of their own, by start method."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import signal
import socket
import struct
import sys
import warnings
from abc import ABC, abstractmethod
from contextlib import suppress
from multiprocessing import forkserver, spawn, util
from typing import TYPE_CHECKING, Any, Protocol

from elasticrs import _core
from elasticrs._worker import TOKEN_VARIABLE, inherited_environment
from elasticrs.multiprocessing import keeper
from elasticrs.multiprocessing.function_process import PreparedFunction, ReturnPipe, call_and_return
from elasticrs.multiprocessing.supervised_group import SupervisedGroup, raise_pending

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.process import BaseProcess


_LOOK_FOR_SIGNALS = 0.1

PATIENCE = 30.0
"""Seconds that a keeper has to end in: more than it gives to all that it has to end."""


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
        self._group: SupervisedGroup | None = None
        self.values: dict[int, bytearray] = {}

    @abstractmethod
    def start(self, streams: Sequence[_core.LogStream]) -> SupervisedGroup:
        """Start all of them.

        Args:
            streams: what is copied to the console meanwhile.
        """

    def _open_pipes(self) -> None:
        for rank in range(self._context.nprocs):
            pipe = self._pipes[rank] = ReturnPipe()
            self.values[rank] = pipe.data

    def _read_pipes(self, group: SupervisedGroup) -> None:
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

    def start(self, streams: Sequence[_core.LogStream]) -> SupervisedGroup:
        """See the base class."""
        try:
            self._open_pipes()
            specs = [self._spec(rank) for rank in range(self._context.nprocs)]
            self._group = SupervisedGroup(stop_scope="worker")
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
            env={**inherited_environment(), **context.envs[rank]},
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
    """Functions whose parent is a :mod:`keeper <elasticrs.multiprocessing.keeper>`.

    Attributes:
        ended: pid and name of what outstayed its time at the end, the first few; after :meth:`finish`.
        more_ended: how many more.
    """

    def __init__(self, context: Functions, cpus: Sequence[Sequence[int]] | None) -> None:
        super().__init__(context, cpus)
        self._control: socket.socket | None = None
        self._keeper: int | None = None
        self._keeper_pidfd = -1
        self._said = b""
        self._has_told_pids = False
        self._gate = -1
        self._ours: list[int] = []
        self._statuses: list[int] = []
        self.ended: list[tuple[int, str]] = []
        self.more_ended = 0

    @abstractmethod
    def _start_keeper(
        self, statuses: list[int], control: int, gate: int, keeps: Mapping[int, Sequence[int]]
    ) -> int:
        """Start it, and return its pid.

        Args:
            statuses: by local rank, the descriptor for the exit status.
            control: its end of the socket.
            gate: the pipe from which the workers take a byte each.
            keeps: by local rank, descriptors that the worker needs besides.
        """

    def start(self, streams: Sequence[_core.LogStream]) -> SupervisedGroup:
        """See the base class."""
        try:
            self.launch()
            pids = self._wait_for_pids()
            self._group = SupervisedGroup(stop_scope="worker")
            self._group.adopt(pids, self._statuses, streams)
            self._read_pipes(self._group)
            self.let_begin()
        except BaseException:
            if self._group is not None:
                self._group.close()
            self.close()
            raise
        return self._group

    def launch(self, keeps: Mapping[int, Sequence[int]] | None = None) -> None:
        """Begin to start all, each of which waits to begin; for who supervises them without a group of ours.

        Args:
            keeps: by local rank, descriptors that it inherits.
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
            self._keeper = self._start_keeper(statuses, ends[0], gate_reader, keeps or {})
            self._keeper_pidfd = os.pidfd_open(self._keeper)
        finally:
            _close_all(ends)

    @property
    def control(self) -> int:
        """Readable when :meth:`take_pids` can go on."""
        return self._socket().fileno()

    @property
    def keeper_pidfd(self) -> int:
        """Readable when everything has ended."""
        return self._keeper_pidfd

    def take_pids(self) -> dict[int, int] | None:
        """The pids by local rank, when the keeper has told them; never waits.

        Raises:
            RuntimeError: they could not be started.
        """
        size = struct.calcsize("i") * self._context.nprocs
        try:
            piece = self._socket().recv(size - len(self._said), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            piece = b""
        if not piece:
            raise RuntimeError("their parent has ended; see its stderr")
        self._said += piece
        if len(self._said) < size:
            return None
        pids = struct.unpack(f"{self._context.nprocs}i", self._said)
        if not all(pids):
            raise RuntimeError("a process ended before it could run its function; see its stderr")
        self._has_told_pids = True
        return dict(enumerate(pids))

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

    def _wait_for_pids(self) -> dict[int, int]:
        while True:
            # Modules that are imported first may take long.
            while not select.select([self.control], [], [], _LOOK_FOR_SIGNALS)[0]:
                raise_pending()
            try:
                pids = self.take_pids()
            except RuntimeError as error:
                raise RuntimeError(f"the processes could not be started: {error}") from None
            if pids is not None:
                return pids

    def _socket(self) -> socket.socket:
        if self._control is None:
            raise AssertionError("`launch` comes first")
        return self._control

    def close(self) -> None:
        """See the base class; returns when the keeper has ended everything."""
        ended = None if self._group is None else self._group.end
        has_succeeded = ended is not None and ended.outcome == "succeeded"
        self.begin_end(keeper.LINGER if has_succeeded else keeper.AT_ONCE)
        self.finish()

    def begin_end(self, linger: float) -> None:
        """Have everything ended; :attr:`keeper_pidfd` is readable then. A later call overrules.

        Args:
            linger: seconds that what the functions have left may go on; ``keeper.AT_ONCE``, ``keeper.LEAVE``.
        """
        if self._control is not None:
            # Refused by one that was killed, and the workers with it.
            with suppress(BrokenPipeError, ConnectionResetError):
                self._control.send(keeper.word(linger))
        if self._keeper is not None and not self._has_told_pids:
            # It may import for long yet. No SIGKILL: it has to collect the workers that it may have.
            with suppress(ProcessLookupError):
                if self._keeper_pidfd != -1:
                    signal.pidfd_send_signal(self._keeper_pidfd, keeper.IMPORT_NO_MORE)
                else:
                    os.kill(self._keeper, keeper.IMPORT_NO_MORE)
                # What the imports have started; not there before it leads a session.
                os.killpg(self._keeper, keeper.IMPORT_NO_MORE)
        if self._keeper_pidfd != -1:
            # A stopped one neither reads nor ends.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._keeper_pidfd, signal.SIGCONT)

    def finish(self, patience: float = PATIENCE) -> None:
        """Wait for the end of the keeper, and close everything. Idempotent.

        Args:
            patience: seconds. What has not ended by then gets SIGKILL, and is not waited for: state D.
        """
        if self._keeper is not None:
            if self._keeper_pidfd == -1 or _has_ended(self._keeper_pidfd, patience):
                # Not there when the program waits for all of its children itself, and was faster.
                with suppress(ChildProcessError):
                    os.waitpid(self._keeper, 0)
            else:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._keeper_pidfd, signal.SIGKILL)
                    os.killpg(self._keeper, signal.SIGKILL)
            self._keeper = None
        if self._keeper_pidfd != -1:
            os.close(self._keeper_pidfd)
            self._keeper_pidfd = -1
        control, self._control = self._control, None
        if control is not None:
            with control:
                if self._has_told_pids:
                    self._take_names(control)
        super().close()
        _close_all(self._ours)
        _close_all(self._statuses)

    def _take_names(self, control: socket.socket) -> None:
        said = b""
        with suppress(BlockingIOError, ConnectionResetError):
            while piece := control.recv(4096, socket.MSG_DONTWAIT):
                said += piece
        *names, more = said.decode().split("\n")[:-1] or ["0"]
        self.ended = [(int(pid), name) for pid, name in (line.split(" ", 1) for line in names)]
        self.more_ended = int(more)


def _has_ended(pidfd: int, patience: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(1000 * patience))


class Fork(Kept):
    """Copies of this process: anything can be passed, and nothing is pickled but what is returned."""

    def _start_keeper(
        self, statuses: list[int], control: int, gate: int, keeps: Mapping[int, Sequence[int]]
    ) -> int:
        # For `multiprocessing.parent_process()`: ends with the program.
        sentinel, writer = os.pipe()
        self._ours.append(writer)
        try:
            return self._fork(self._plans(statuses, sentinel, keeps), control, gate)
        finally:
            os.close(sentinel)

    def _plans(
        self, statuses: list[int], sentinel: int, keeps: Mapping[int, Sequence[int]]
    ) -> list[keeper.WorkerPlan]:
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
        return [
            keeper.WorkerPlan(
                _RunForked(process, context.envs[rank], sentinel),
                context.stdouts[rank],
                context.stderrs[rank],
                None if self._cpus is None else self._cpus[rank],
                statuses[rank],
                [self._pipes[rank].writer, *keeps.get(rank, ())],
            )
            for rank, process in enumerate(processes)
        ]

    def _fork(self, workers: list[keeper.WorkerPlan], control: int, gate: int) -> int:
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

    def _start_keeper(
        self, statuses: list[int], control: int, gate: int, keeps: Mapping[int, Sequence[int]]
    ) -> int:
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
            environment = {**inherited_environment(), **context.envs[rank]}
            workers.append(
                keeper.WorkerPlan(
                    keeper.RunPrepared(environment, prepared.tracker_fd, prepared.pipe_handle),
                    context.stdouts[rank],
                    context.stderrs[rank],
                    None if self._cpus is None else self._cpus[rank],
                    statuses[rank],
                    sorted({writer, *prepared.fds, *keeps.get(rank, ())} - {prepared.tracker_fd}),
                )
            )
        server: Any = forkserver._forkserver
        data = spawn.get_preparation_data("ignore")
        main_path, argv = data.get("init_main_from_path"), data["sys_argv"]
        plan = os.memfd_create("elasticrs-fork-server")
        try:
            with open(plan, "wb", closefd=False) as file:
                pickle.dump(
                    (list(server._preload_modules), main_path, argv, (workers, control, gate, os.getpid())),
                    file,
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

    def finish(self, patience: float = PATIENCE) -> None:
        """See the base class."""
        super().finish(patience)
        while self._prepared:
            self._prepared.pop().close()


class _RunForked:
    """Runs a function in a copy of this process.

    Args:
        process: multiprocessing's object.
        env: added to the environment.
        sentinel: a pipe that ends with the program.
    """

    def __init__(self, process: BaseProcess, env: dict[str, str], sentinel: int) -> None:
        self._process = process
        self._env = env
        self._sentinel = sentinel

    def __call__(self) -> int:
        """Run it, and return the exit code."""
        os.environ.pop(TOKEN_VARIABLE, None)
        os.environ.update(self._env)
        heartbeats = sys.modules.get("elasticrs.timer.heartbeats")
        if heartbeats is not None:
            heartbeats.start_afresh()
        run: Callable[[int], int] = self._process._bootstrap  # type: ignore[attr-defined]
        return run(self._sentinel)


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
