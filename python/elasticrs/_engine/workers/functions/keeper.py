"""The keeper: the process that forks function workers for ``fork`` and ``forkserver``, and is their parent.

The nursery cannot fork such functions, because it runs a different program. The keeper reports exits to the
core, and kills leftover processes as their subreaper. For ``fork``, it is itself a fork of the program. For
``forkserver``, it is a new interpreter that has imported multiprocessing's preload modules.

- **KEEP-1** The keeper has a single thread, so its forks copy no lock that another thread holds.
- **KEEP-2** The keeper imports nothing between its own fork and the forks of the workers. After those forks,
  it uses the core, but only to classify processes that it may have to kill.
- **KEEP-3** Workers are killed when the keeper dies, through PDEATHSIG. The kernel sends this signal when the
  thread that forked the workers exits, and the keeper has no other thread. If the program dies or sends a
  request, the keeper kills all workers.
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
from elasticrs._engine.inside.hook.sitecustomize import follow_imports
from elasticrs._engine.job.value import Value
from elasticrs._engine.process.console import Console, descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LINGER = 5.0
"""Seconds for which a worker's descendants may continue after success, as under the nursery."""

WORD = struct.Struct("d")
"""Message to the keeper (the process that forks the workers) when the workers have exited or must be killed.
It is the number of seconds for which the workers' descendants may continue, :data:`AT_ONCE`, or
:data:`LEAVE`. A further message kills the remaining descendants at once.
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
"""Original ``os._exit``, which ends a forked copy of the program. A profiler may have replaced ``os._exit``
with a function that raises an exception. The copy would then continue to run the program.
"""

IMPORT_NO_MORE = signal.SIGRTMAX
"""Signal that kills a keeper and the processes that it has started, during its imports; ignored afterwards.
The signal has a name in ``signal.Signals``, because a profiler that replaces ``signal.signal`` may require
one.
"""

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, IMPORT_NO_MORE)


_libc = ctypes.CDLL(None, use_errno=True)


class WorkerPlan(Value):
    """Parameters for forking one worker. If the path for a stream is empty, the stream is not redirected. The
    worker's exit status is written to the descriptor ``status``. ``keeps`` are the descriptors that this
    worker inherits, but no other worker.
    """

    run: Callable[[], int]
    stdout: str
    stderr: str
    cpus: Sequence[int] | None
    status: int
    keeps: Sequence[int]


def keep(workers: Sequence[WorkerPlan], control: int, gate: int, parent: int) -> None:
    """Fork the workers, and serve the program's requests until the workers are no longer needed. ``control``
    is a socket to the program. The keeper sends the workers' pids (zeros if one could not run), and later the
    names of the processes that it kills. It receives messages of the type :data:`WORD`. The workers call
    their functions when a byte arrives on the pipe ``gate``.
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
    """Create a new session, so that signals from the terminal do not reach the workers."""
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
    """Report exit statuses of the workers until the program exits or sends a :data:`WORD`. Return the number
    of seconds in it.
    """
    poll = select.poll()
    running = {os.pidfd_open(pid): pid for pid in statuses}
    for fd in (control, parent_pidfd, *running):
        poll.register(fd, select.POLLIN)
    ended: set[int] = set()
    while True:
        # A debugger may keep us from reaping an exited worker. No event tells when we can, so poll meanwhile.
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
    """Let the workers' leftover descendants continue for ``linger`` seconds, and then send them SIGTERM.
    Return early if the program exits or sends a message.
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
        # List the children again after each exit, because the keeper inherits an exited child's children.
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
    """Send the pid and the name of each killed process, one per line. If there are too many, send only the
    number of the remaining ones.
    """
    lines = [f"{pid} {_name_of(pid)}\n" for pid in pids[:_NAMED]]
    lines.append(f"{len(pids) - len(lines)}\n")
    try:
        os.write(control, "".join(lines).encode())
    except BrokenPipeError:
        return  # The program has closed the socket.


def _name_of(pid: int) -> str:
    """Return a process's name without unprintable characters, because it must fit into one line."""
    return "".join(character if character.isprintable() else " " for character in _core.name_of(pid))


def _end_all() -> None:
    """Kill all descendants, and multiprocessing's resource trackers last. Repeat this until none is left,
    because orphans become children of the keeper.
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
        return  # Not expected, because the child has not been reaped, and even a zombie accepts signals.


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
    """Callable that loads and runs a function, which was prepared as multiprocessing does for ``spawn``."""

    environment: dict[str, str]
    tracker_fd: int
    pipe_handle: int

    def __call__(self) -> int:
        os.environ.clear()
        os.environ.update(self.environment)
        follow_imports()
        tracker: Any = resource_tracker._resource_tracker
        tracker._fd = self.tracker_fd
        main: Callable[[int, int], int] = spawn._main
        return main(self.pipe_handle, os.dup(self.pipe_handle))


def main(plan_fd: int) -> None:
    """Run a fork server: import modules, and then call :func:`keep`. The file ``plan_fd`` contains the
    arguments.
    """
    # Create a process group before the imports run user code: the program that started us can then kill them.
    lead_session()
    with open(plan_fd, "rb") as file:
        preload, main_path, argv, arguments = pickle.load(file)
    # The kernel sends this signal when the program dies. During the imports, which may take forever, it kills
    # this process. Afterwards it is ignored, because this process must kill its workers before it exits.
    _prctl(_PR_SET_PDEATHSIG, IMPORT_NO_MORE)
    if os.getppid() != arguments[-1]:
        return
    # The workers import the program's main module, which must see the program's own arguments.
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
