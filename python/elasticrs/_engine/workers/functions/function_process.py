"""Prepare a function to run in a separate process, and create the pipe for its return value.

Multiprocessing can pickle queues and locks only while it launches a process. So its ``Popen`` prepares what
the child needs, but another component starts the process. The child watches a pipe that stays open here.
"""

from __future__ import annotations

import fcntl
import io
import multiprocessing
import os
import pickle
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn
from multiprocessing.context import set_spawning_popen
from typing import TYPE_CHECKING, Any

from elasticrs._engine import public
from elasticrs._engine.inside.keep import keep_own
from elasticrs._engine.job.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

_CHUNK = 1 << 20
_PIPE_CAPACITY = 65536


class ReturnPipe:
    """Pipe through which a process returns a function's value. ``data``, the pickled value, stays empty if
    the function fails. The descriptor of a closed end is -1.
    """

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.data = bytearray()

    def close_writer(self) -> None:
        """Close this process's copy of the write end. Idempotent."""
        if self.writer != -1:
            os.close(self.writer)
            self.writer = -1

    def read(self) -> bool | None:
        """Read available data from the pipe. Return true at the end of the data, false if none is available
        now, and ``None`` if more may follow.
        """
        try:
            piece = os.read(self.reader, _CHUNK)
        except BlockingIOError:
            return False
        self.data += piece
        return None if piece else True

    def close(self) -> None:
        self.close_writer()
        if self.reader != -1:
            os.close(self.reader)
            self.reader = -1


class _Launch(popen_spawn_posix.Popen):
    """Variant of ``Popen`` that collects the data a child process needs, but does not start the child."""

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
    """Check that the main program is a file, because each child has to import it to find the function."""
    if path is not None and not os.path.exists(path):
        raise RuntimeError(
            f"the program is not a file that another process could import ({os.path.basename(path)}): "
            "put the function into a module, or use start_method='fork'"
        )


_BEGIN = (
    "import sys; from multiprocessing.spawn import spawn_main; "
    "spawn_main(**{name: int(fd) for name, _, fd in (given.partition('=') for given in sys.argv[2:])})"
)


def command_line(tracker_fd: int, pipe_handle: int) -> list[str]:
    """Return a multiprocessing child's command line. Arguments that differ between workers come last."""
    _, *options = spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=pipe_handle)
    if "-c" in options:  # A frozen program has no `-c` option, and its arguments need no change.
        told = (f"tracker_fd={tracker_fd}", f"pipe_handle={pipe_handle}")
        options[options.index("-c") + 1 :] = [_BEGIN, "--multiprocessing-fork", *told]
    return [os.fsdecode(spawn.get_executable()), *options]


class PreparedFunction:
    """All that a child process needs to run a function. The child inherits the descriptors ``fds`` under the
    same numbers.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], result: int, name: str
    ) -> None:
        self._childs_ends: list[int] = []
        self._our_ends: list[int] = []
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=call_and_return, args=(function, arguments, result), name=name)
        try:
            launch = _Launch(process)
            self._childs_ends.append(launch.payload_fd)
            self.pipe_handle, writer = os.pipe()
            self._childs_ends.append(self.pipe_handle)
            self._our_ends.append(writer)
            # Make the pipe large enough for all of the data, because nothing reads from it yet.
            if len(launch.preparation) > _PIPE_CAPACITY:
                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, len(launch.preparation))
            with open(writer, "wb", closefd=False) as file:
                file.write(launch.preparation)
        except BaseException:
            self.close()
            raise
        self.tracker_fd = launch.tracker_fd
        self.argv = command_line(self.tracker_fd, self.pipe_handle)
        self.fds = sorted({*launch._fds, self.pipe_handle, result})

    def close_childs_ends(self) -> None:
        close_all(self._childs_ends)

    def close(self) -> None:
        close_all(self._childs_ends)
        close_all(self._our_ends)


def close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


class _Deferred(Value):
    """Placeholder for a process object of multiprocessing, which is stored in a file in memory. Unpickling
    the placeholder loads the object from the file. It can be unpickled only at that time, because some
    objects can be unpickled only while multiprocessing itself unpickles.
    """

    fd: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_process, (self.fd,)


def _load_process(fd: int) -> BaseProcess:
    with open(fd, "rb") as file:
        process: BaseProcess = pickle.load(file)
    return process


def call_and_return(function: Callable[..., Any], arguments: tuple[Any, ...], result: int) -> None:
    """Run a function, wrapped in ``record`` as in torch. Write the pickled return value to ``result``."""
    try:
        # Look up the error handler now, because a program may have replaced it.
        record = public("multiprocessing.errors.record")
        value = record(function)(*arguments)
        # Pickle inside of the recorded function, because multiprocessing would only print a pickling error.
        record(_send)(value, result)
    except SystemExit as error:
        if error.code not in (None, 0):
            keep_own()
        raise
    except Exception as error:
        from elasticrs._engine.inside import fast_exit
        from elasticrs._engine.inside.error_file import give_notice, keep_flight_record

        give_notice(os.environ.get("ELASTICRS_NOTICES", ""), error)
        keep_flight_record(error)
        # Copy the training state here, because a process that runs a function does not call `sys.excepthook`,
        # which does that in scripts.
        keep_own()
        if fast_exit.is_enabled():
            fast_exit.leave_after_callbacks(1)
        raise


def _send(value: object, result: int) -> None:
    with open(result, "wb") as file:
        file.write(pickle.dumps(value))
