"""The keeper: the process that forks function workers for the start methods ``fork`` and ``forkserver``, and
is their parent.

::

    program ── keeper ── worker 0, worker 1, …

The nursery cannot fork such functions, because it runs a different program. So a separate process, the
keeper, forks the workers and reports their exits to the core. It is their subreaper and kills their leftover
processes. For ``fork``, the keeper is itself forked from the program. For ``forkserver``, it is a new
interpreter that has imported the modules that multiprocessing would preload.

- **KEEP-1** The keeper has a single thread, so its forks copy no lock that another thread holds.
- **KEEP-2** The keeper imports nothing between its own fork and the forks of the workers. After those forks,
  it uses the core, but only to classify processes that it may have to kill.
- **KEEP-3** Workers are killed when the keeper dies, through PDEATHSIG. The kernel sends this signal when the
  thread that forked the workers exits. The keeper has no other thread, so that thread exits only when the
  keeper dies. If the program dies or sends a request, the keeper kills all workers.
- **KEEP-4** A worker starts to run only after the core has started to monitor it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import posix
import select
import signal
import struct
import sys
import time
from multiprocessing import process as multiprocessing_process
from multiprocessing import resource_tracker, spawn
from typing import TYPE_CHECKING, Any

from elasticrs import _core
from elasticrs._engine.job.value import Value
from elasticrs._engine.process.console import Console, descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LINGER = 5.0
"""Seconds for which a worker's descendants may continue after success, as under the nursery."""

WORD = struct.Struct("d")
"""Message from the program to the keeper, sent when the workers have exited or must be killed. It contains
the number of seconds for which their descendants may continue, :data:`AT_ONCE`, or :data:`LEAVE`. On a later
message, the keeper kills the remaining descendants at once.
"""
AT_ONCE, LEAVE = -1.0, -2.0

GO = b"g"
_NAMED = 16

_TERM_GRACE = 1.0
_GIVE_UP = 10.0
_LAST_MOMENT = 1.0
_LOOK = 0.005
_LOOK_AT_TRACED = 0.1

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

exit_at_once = posix._exit
"""Original ``os._exit``. A profiler may have replaced ``os._exit`` with a function that raises an exception.
A call of that function would let the forked copy of the program continue.
"""

IMPORT_NO_MORE = signal.SIGRTMAX
"""Signal that kills a keeper during its imports, together with the processes that the imports have started.
After the imports, the keeper ignores this signal and waits for messages from the program. The signal has a
name in ``signal.Signals``, unlike most real-time signals. A profiler that replaces ``signal.signal`` may
require such a name.
"""

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, IMPORT_NO_MORE)


_libc = ctypes.CDLL(None, use_errno=True)


class WorkerPlan(Value):
    """Parameters for forking one worker.

    Args:
        run: calls the function and returns the exit code.
        stdout: path of the file for standard output; empty if it is not redirected.
        stderr: path of the file for standard error; empty if it is not redirected.
        cpus: CPUs that the worker may use; ``None`` for all.
        status: file descriptor to which the keeper writes the worker's exit status.
        keeps: file descriptors that only this worker needs.
    """

    run: Callable[[], int]
    stdout: str
    stderr: str
    cpus: Sequence[int] | None
    status: int
    keeps: Sequence[int]


def keep(workers: Sequence[WorkerPlan], control: int, gate: int, parent: int) -> None:
    """Fork the workers, and serve the program's requests until the workers are no longer needed. This is the
    main function of the keeper process.

    Args:
        workers: workers by local rank.
        control: socket to the program. The keeper sends the pids of the workers (zeros if a worker exited
            before it could run). Then it receives a message that says how to stop, and sends the names of the
            processes that it kills, see :func:`_tell_names`.
        gate: pipe from which each worker reads one byte before it starts to run.
        parent: pid of the program.
    """
    lead_session()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.set_wakeup_fd(-1)
    handlers: dict[int, Any] = {signum: signal.signal(signum, signal.SIG_IGN) for signum in _IGNORED}
    children = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    handlers[signal.SIGCHLD] = children
    try:
        parent_pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    ready_reader, ready_writer = os.pipe()
    pids: list[int] = []
    linger = AT_ONCE
    try:
        for worker in workers:
            pid = os.fork()
            if pid == 0:
                others = [fd for other in workers for fd in (other.status, *other.keeps)]
                unused = {control, parent_pidfd, ready_reader, *others} - set(worker.keeps)
                _be_worker(worker, unused, handlers, gate, ready_writer)
            pids.append(pid)
        os.close(ready_writer)
        for worker in workers:
            for fd in worker.keeps:
                os.close(fd)
        are_ready = _read_all(ready_reader, len(pids))
        try:
            os.write(control, struct.pack(f"{len(pids)}i", *(pids if are_ready else [0] * len(pids))))
        except BrokenPipeError:
            return  # The program closed the socket or died. The `finally` block kills the workers.
        linger = _serve(
            dict(zip(pids, (worker.status for worker in workers), strict=True)), control, parent_pidfd
        )
        if linger >= 0:
            _end_lingerers(linger, control, parent_pidfd)
    finally:
        if linger != LEAVE:
            _end_all()


def lead_session() -> None:
    """Create a new session, so that signals from the terminal do not reach the workers. The program that
    started the workers decides when to stop them.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()


def _be_worker(worker: WorkerPlan, unused: set[int], handlers: dict[int, Any], gate: int, ready: int) -> None:
    code = 1
    try:
        keeper = os.getppid()
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            return
        for fd in unused:
            os.close(fd)
        for signum, handler in handlers.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        if worker.cpus is not None:
            os.sched_setaffinity(0, worker.cpus)
        for path, std in ((worker.stdout, "stdout"), (worker.stderr, "stderr")):
            if path:
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                for fd in descriptors(std):
                    os.dup2(file, fd)
                os.close(file)
        os.write(ready, GO)
        os.close(ready)
        if os.read(gate, 1) == GO:
            os.close(gate)
            code = worker.run()
    except BaseException as error:
        os.write(2, f"a worker could not start: {error!r}\n".encode(errors="replace"))
    finally:
        exit_at_once(code)


def _serve(statuses: dict[int, int], control: int, parent_pidfd: int) -> float:
    """Report the workers' exit statuses until the parent program sends a message or exits. Return the number
    of seconds for which the workers' descendants may keep running; see :data:`WORD`.
    """
    poll = select.poll()
    running = {os.pidfd_open(pid): pid for pid in statuses}
    for fd in (control, parent_pidfd, *running):
        poll.register(fd, select.POLLIN)
    ended: set[int] = set()
    while True:
        # A debugger that traces an exited worker receives its exit status first. Poll in this case, because
        # no event announces that the debugger has released the worker.
        ready = {fd for fd, _ in poll.poll(1000 * _LOOK_AT_TRACED if ended else None)}
        for fd in ready & running.keys():
            ended.add(running.pop(fd))
            poll.unregister(fd)
            os.close(fd)
        for pid in tuple(ended):
            collected, status = os.waitpid(pid, os.WNOHANG)
            if collected:
                ended.remove(pid)
                os.write(statuses[pid], struct.pack("i", status))
        if control in ready:
            said = os.read(control, WORD.size)
            # A short read means that the program has closed the socket or died.
            return float(WORD.unpack(said)[0]) if len(said) == WORD.size else AT_ONCE
        if parent_pidfd in ready:
            return AT_ONCE


def _end_lingerers(linger: float, control: int, parent_pidfd: int) -> None:
    """Let leftover processes run for ``linger`` more seconds, and then send them SIGTERM. Return early if the
    parent process exits or sends a message, so that the caller can kill the leftover processes.
    """
    if not _outlasted(linger, control, parent_pidfd):
        return
    left = [pid for pid in _core.children() if _core.patience_with(pid) is None]
    _tell_names(left, control)
    for pid in left:
        _kill(pid, signal.SIGTERM)
    _outlasted(_TERM_GRACE, control, parent_pidfd)


def _outlasted(seconds: float, control: int, parent_pidfd: int) -> bool:
    deadline = time.monotonic() + seconds
    while not _reaped_all(0):
        left = deadline - time.monotonic()
        if left <= 0:
            return True
        # Wait only for the first child, because every child has to exit anyway. Read the list of children
        # again after each wait, because this process inherits the children of an exited child.
        pidfds = [os.pidfd_open(pid) for pid in _core.children()[:1]]
        try:
            poll = select.poll()
            for fd in (control, parent_pidfd, *pidfds):
                poll.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(1000 * (left if pidfds else min(left, _LOOK)))}
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
        if ready - set(pidfds):
            return False
    return False


def _tell_names(pids: Sequence[int], control: int) -> None:
    """Send the pids and names of the first killed processes to the parent program, one process per line. The
    last line contains the number of all further killed processes.
    """
    lines = [f"{pid} {_name_of(pid)}\n" for pid in pids[:_NAMED]]
    lines.append(f"{len(pids) - len(lines)}\n")
    try:
        os.write(control, "".join(lines).encode())
    except BrokenPipeError:
        return  # The program has closed the socket.


def _name_of(pid: int) -> str:
    """Return the name of a process. Replace unprintable characters with spaces, because they could break the
    line.
    """
    return "".join(character if character.isprintable() else " " for character in _core.name_of(pid))


def _end_all() -> None:
    """Kill all descendants of this process. Kill clean-up processes, such as multiprocessing's resource
    tracker, last.

    Repeat until no child is left, because orphaned descendants become children of this process.
    """
    give_up = time.monotonic() + _GIVE_UP
    alone_since = None
    while (now := time.monotonic()) < give_up + _LAST_MOMENT:
        patience = {pid: _core.patience_with(pid) for pid in _core.children()}
        if alone_since is None and None not in patience.values():
            alone_since = now
        for pid, seconds in patience.items():
            may_go_on = seconds is not None and (alone_since is None or now < alone_since + seconds)
            if not may_go_on or now >= give_up:
                _kill(pid, signal.SIGKILL)
        if _reaped_all(_LOOK):
            return
    left = ", ".join(f"{pid} ({_name_of(pid)})" for pid in _core.children())
    line = f"could not kill processes that functions left behind: {left}\n"
    os.write(2, Console().prefixed(line).encode())


def _reaped_all(seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK / 5)


def _kill(pid: int, signum: signal.Signals) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        # `ESRCH` is not expected, because the child has not been reaped, and even a zombie accepts signals.
        return


def _read_all(fd: int, count: int) -> bool:
    while count > 0:
        piece = os.read(fd, count)
        if not piece:
            break
        count -= len(piece)
    os.close(fd)
    return count == 0


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# --- for `forkserver` ---


class RunPrepared(Value):
    """Callable that loads and runs a function. The function was prepared in the same way as for
    multiprocessing's ``spawn``.
    """

    environment: dict[str, str]
    tracker_fd: int
    pipe_handle: int

    def __call__(self) -> int:
        os.environ.clear()
        os.environ.update(self.environment)
        tracker: Any = resource_tracker._resource_tracker
        tracker._fd = self.tracker_fd
        main: Callable[[int, int], int] = spawn._main
        return main(self.pipe_handle, os.dup(self.pipe_handle))


def main(plan_fd: int) -> None:
    """Import modules, and then fork and supervise the workers. This is the main function of a fork server.

    Args:
        plan_fd: descriptor of a file with pickled data: the modules to import, the path of the main module,
            the program's arguments, and the arguments of :func:`keep`.
    """
    # Create a new process group with `setsid` before any user code runs, because the parent program signals
    # this group to stop the imports and the processes that they have started.
    lead_session()
    with open(plan_fd, "rb") as file:
        preload, main_path, argv, arguments = pickle.load(file)
    # Have the kernel send a signal when the launching program dies. During the imports, the signal kills this
    # process, because the imports may take forever.
    #
    # After the imports, this process ignores the signal, because it must kill its workers before it exits.
    _prctl(_PR_SET_PDEATHSIG, IMPORT_NO_MORE)
    if os.getppid() != arguments[-1]:
        return
    # Set `sys.argv` as in the workers, because this process imports the main module in the same way.
    sys.argv[:] = argv
    current: Any = multiprocessing_process.current_process()
    for name in preload:
        if name == "__main__":
            if main_path is not None:
                current._inheriting = True
                try:
                    spawn.import_main_path(main_path)
                finally:
                    del current._inheriting
            continue
        try:
            __import__(name)
        except ImportError as error:
            sys.stderr.write(Console().prefixed(f"the fork server cannot import {name}: {error}\n"))
    sys.stdout.flush()
    keep(*arguments)
