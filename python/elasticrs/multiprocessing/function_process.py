"""Workers that are Python functions, started the way of multiprocessing's ``spawn``, but by our own spawner.

Multiprocessing pickles queues and locks only while it launches a process, and passes their descriptors along.
So its ``Popen`` is subclassed: the launch stops when everything that the child needs lies ready, and the core
then starts all workers of the attempt as one unit.

What a child gets: a pipe with multiprocessing's preparation data, kept open here so that the child sees our
end; a memory file with the pickled function, its arguments and whatever it refers to, of any size; and a pipe
for the return value, read here while the workers run.
"""

from __future__ import annotations

import fcntl
import io
import multiprocessing
import os
import pickle
import select
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn
from multiprocessing.context import set_spawning_popen
from typing import TYPE_CHECKING, Any

from elasticrs import _core
from elasticrs._worker.run_path import run_script_path
from elasticrs.multiprocessing.errors import record
from elasticrs.utils.api import macros
from elasticrs.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from multiprocessing.process import BaseProcess

    from elasticrs.agent.attempt import Attempt
    from elasticrs.logs import LogPaths
    from elasticrs.workers import WorkerSetup

_CHUNK = 1 << 20
_PIPE_CAPACITY = 65536
_TRACKER_TIME = 1.0


class FunctionWorkers(Workers):
    """Workers that call a function.

    Args:
        setup: what all kinds need.
        function: importable by name, as multiprocessing's ``spawn`` demands.
        arguments: for all workers the same, but for ``${local_rank}`` in those that are text, as in torch.
    """

    def __init__(self, setup: WorkerSetup, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        super().__init__(setup)
        self._function = function
        self._arguments = tuple(arguments)
        self._prepared: list[PreparedFunction] = []
        self._results: dict[int, ReturnPipe] = {}
        self._values: dict[int, bytes] = {}
        self._silent: list[int] = []

    def specs(self, paths: LogPaths, environments: Mapping[int, dict[str, str]]) -> list[_core.ProcessSpec]:
        """See the base class."""
        specs: list[_core.ProcessSpec] = []
        # Those of an earlier attempt may be of other ranks.
        self._values.clear()
        for local_rank, env in environments.items():
            result = self._results[local_rank] = ReturnPipe()
            prepared = PreparedFunction(
                self._function,
                self.arguments(local_rank),
                result.writer,
                f"{self._setup.job.name}:{local_rank}",
            )
            self._prepared.append(prepared)
            specs.append(
                _core.ProcessSpec(
                    local_rank,
                    prepared.argv,
                    env=env,
                    stdout=paths.stdouts.get(local_rank) or None,
                    stderr=paths.stderrs.get(local_rank) or None,
                    pass_fds=sorted({*prepared.fds, result.writer}),
                    cpus=self.cpus(local_rank),
                )
            )
        return specs

    def arguments(self, local_rank: int) -> tuple[Any, ...]:
        """Those of one worker."""
        return tuple(macros.substitute(list(self._arguments), str(local_rank)))

    def started(self, supervisor: _core.Supervisor, attempt: Attempt) -> None:  # noqa: ARG002
        """Let go of the children's ends, and read what they return from now on."""
        for prepared in self._prepared:
            prepared.forget_childs_ends()
        for result in self._results.values():
            result.forget_writer()
            supervisor.watch_fd(result.reader)

    def fd_ready(self, supervisor: _core.Supervisor, fd: int) -> None:
        """Read a piece of a return value."""
        for result in self._results.values():
            if result.reader == fd and result.read():
                supervisor.unwatch_fd(fd)
                result.close()

    def ended(self, supervisor: _core.Supervisor, attempt: Attempt, *, has_succeeded: bool = False) -> None:
        """Read what is left, and close everything."""
        del has_succeeded
        self._silent.clear()
        for local_rank, result in self._results.items():
            if result.is_open:
                while result.read() is None:
                    continue
                if result.is_watched:
                    supervisor.unwatch_fd(result.reader)
                result.close()
            self._values[attempt.plan.ranks[local_rank].global_rank] = bytes(result.data)
            if not result.data:
                self._silent.append(local_rank)
        self._release()

    def close(self) -> None:
        """See the base class."""
        self._release()

    def _release(self) -> None:
        for result in self._results.values():
            if result.is_open:
                result.close()
        self._results.clear()
        for prepared in self._prepared:
            prepared.close()
        self._prepared.clear()

    def silent_ranks(self) -> Collection[int]:
        """Those that ended by ``os._exit``, say."""
        return self._silent

    def return_values(self) -> dict[int, object]:
        """What the functions returned.

        Raises:
            pickle.UnpicklingError: or whatever else the value's own class raises.
        """
        return {rank: pickle.loads(data) for rank, data in self._values.items()}


class RunScripts(FunctionWorkers):
    """What all workers have in common that run a script by :func:`run_script_path`, in a process that is ours
    alone, however they are started.
    """

    def close(self) -> None:
        """Stop multiprocessing's own helper as well: it would outlive the launcher by some time."""
        super().close()
        stop_tracker()

    def silent_ranks(self) -> Collection[int]:
        """None: see below."""
        return ()

    def return_values(self) -> dict[int, object]:
        """Scripts return nothing, and may end by ``os._exit(0)``."""
        return dict.fromkeys(range(self._setup.job.nproc))


class ScriptWorkers(RunScripts):
    """Those by ``spawn``.

    Args:
        setup: what all kinds need.
        script: its path, and its arguments.
    """

    def __init__(self, setup: WorkerSetup, script: Sequence[str]) -> None:
        super().__init__(setup, run_script_path, script)


def stop_tracker() -> None:
    """End multiprocessing's own helper, if there is one; in a process that is ours alone.

    It ends when nobody has its pipe any more. A descendant of a worker that was left alone may have it: the
    helper ends with that one, then, and is not waited for.
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


class ReturnPipe:
    """The pipe for one return value.

    Attributes:
        data: what has been read.
    """

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.data = bytearray()
        self.is_open = True
        self.is_watched = False

    def forget_writer(self) -> None:
        os.close(self.writer)
        self.writer = -1
        self.is_watched = True

    def read(self) -> bool | None:
        """Take one piece: whether nothing more can come now; ``None`` when there may be more."""
        try:
            piece = os.read(self.reader, _CHUNK)
        except BlockingIOError:
            return False
        self.data += piece
        return None if piece else True

    def close(self) -> None:
        self.is_open = False
        os.close(self.reader)
        self.reader = -1
        if self.writer != -1:
            os.close(self.writer)


class _Launch(popen_spawn_posix.Popen):
    """Collects what the child needs instead of starting it."""

    _fds: list[int]

    def _launch(self, process_obj: BaseProcess) -> None:
        data = spawn.get_preparation_data(process_obj.name)
        _check_program(data.get("init_main_from_path"))
        tracker_fd = resource_tracker.getfd()
        if tracker_fd is None:
            raise RuntimeError("multiprocessing's resource tracker did not start")
        self.tracker_fd = tracker_fd
        self.duplicate_for_child(self.tracker_fd)
        preparation = io.BytesIO()
        payload = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(data, preparation)
            reduction.dump(process_obj, payload)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise pickle.PicklingError(
                f"{error}: a function for another process must be at the top level of a module, and its "
                "arguments must be picklable; start_method='fork' accepts any"
            ) from error
        finally:
            set_spawning_popen(None)
        self.payload_fd = os.memfd_create("elasticrs-function")
        with open(self.payload_fd, "wb", closefd=False) as file:
            file.write(payload.getbuffer())
        os.lseek(self.payload_fd, 0, os.SEEK_SET)
        self.duplicate_for_child(self.payload_fd)
        reduction.dump(_Deferred(self.payload_fd), preparation)
        self.preparation = preparation.getvalue()


def _check_program(path: str | None) -> None:
    """Each child runs it again, up to ``if __name__ == "__main__"``, to find the function."""
    if path is not None and not os.path.exists(path):
        raise RuntimeError(
            f"the program is not a file that another process could import ({os.path.basename(path)}): "
            "put the function into a module, or use start_method='fork'"
        )


class PreparedFunction:
    """Everything that one child needs, ready to be passed to it.

    Args:
        function: what it calls.
        arguments: with what.
        result: the descriptor for what the function returns.
        name: of the process.

    Attributes:
        argv: of an interpreter that runs it.
        fds: what it needs, under the same numbers.
        tracker_fd: of those, multiprocessing's resource tracker.
        pipe_handle: of those, the pipe with multiprocessing's preparation data.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], result: int, name: str
    ) -> None:
        self._payload_fd = self._child_reader = self._parent_writer = -1
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=call_and_return, args=(function, arguments, result), name=name)
        try:
            launch = _Launch(process)
            self._payload_fd = launch.payload_fd
            self._child_reader, self._parent_writer = os.pipe()
            self._fill_pipe(launch.preparation)
        except BaseException:
            self.close()
            raise
        self.tracker_fd, self.pipe_handle = launch.tracker_fd, self._child_reader
        command = spawn.get_command_line(tracker_fd=self.tracker_fd, pipe_handle=self.pipe_handle)
        self.argv = [os.fsdecode(spawn.get_executable()), *command[1:]]
        self.fds = [*launch._fds, self._child_reader]

    def _fill_pipe(self, preparation: bytes) -> None:
        # Nobody reads yet: all of it has to fit.
        if len(preparation) > _PIPE_CAPACITY:
            fcntl.fcntl(self._parent_writer, fcntl.F_SETPIPE_SZ, len(preparation))
        with open(self._parent_writer, "wb", closefd=False) as file:
            file.write(preparation)

    def forget_childs_ends(self) -> None:
        for fd in (self._payload_fd, self._child_reader):
            os.close(fd)
        self._payload_fd = self._child_reader = -1

    def close(self) -> None:
        for fd in (self._payload_fd, self._child_reader, self._parent_writer):
            if fd != -1:
                os.close(fd)


class _Deferred:
    """Stands for the process object in the pipe; unpickling it in the child loads the real one from the
    memory file.

    It happens inside multiprocessing's own unpickling, as what belongs to a process may only be unpickled
    there.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_process, (self._fd,)


def _load_process(fd: int) -> BaseProcess:
    with open(fd, "rb") as file:
        process: BaseProcess = pickle.load(file)
    return process


def call_and_return(function: Callable[..., Any], arguments: tuple[Any, ...], result: int) -> None:
    """What the process of a function does.

    Args:
        function: as in torch under :func:`record`.
        arguments: for it.
        result: the descriptor that gets what it returned, pickled.
    """
    try:
        value = record(function)(*arguments)
        # A value that cannot be pickled is the worker's failure as well, and multiprocessing only prints it.
        record(_send)(value, result)
    except Exception:
        from elasticrs._worker.error_file import give_notice

        give_notice(os.environ.get("TORCHELASTIC_ERROR_FILE") or os.devnull)
        raise


def _send(value: object, result: int) -> None:
    with open(result, "wb") as file:
        file.write(pickle.dumps(value))
