"""Groups of processes below torch's ``PContext``: those that a supervisor starts, and those that handlers
of the program start.

If several threads use a group with a supervisor, one thread waits for events, and the others wait for it.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import signal
import subprocess
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from elasticrs import _core
from elasticrs._engine.failures import JobFailedError
from elasticrs._engine.job.value import Value
from elasticrs._engine.workers.event_log import Adopted, EventLog
from elasticrs._engine.workers.functions.interrupts import waiting
from elasticrs._engine.workers.process import adopt, end_at_once

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger("elasticrs.multiprocessing")

GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL if a process has failed."""

DRAIN_TIMEOUT = 10.0
"""Seconds that a finished group waits until a slow console has shown all output. The log files are complete
in any case.
"""

LATE = 1.0
"""Maximum number of seconds for which events that are already pending are handled after a wait. There is a
limit because a descriptor may stay readable forever.
"""

_LOOK = 0.1
"""Seconds between polls of programs that other code has started."""

_KILL_LIMIT = 10.0
"""Seconds to wait for the exit of such programs after SIGKILL. The wait is limited, because a program may
hang in the kernel.
"""

_END_SLACK = 45.0
"""Seconds to wait for the group after the grace period. This is longer than the core's own limit of 30 s."""


class NotStartedError(JobFailedError, RuntimeError): ...


class _NotFoundError(NotStartedError, FileNotFoundError):
    pass


class _NotPermittedError(NotStartedError, PermissionError):
    pass


_KINDS: dict[int | None, type[NotStartedError]] = {
    errno.ENOENT: _NotFoundError,
    errno.EACCES: _NotPermittedError,
    errno.EPERM: _NotPermittedError,
}


def not_started(text: str, number: int | None) -> NotStartedError:
    """Return an error for the caller to raise, of the types that torch raises for this ``errno``."""
    error = _KINDS.get(number, NotStartedError)(text)
    if isinstance(error, OSError):
        error.errno = number
    return error


class SupervisedGroup:
    """Group of processes that this class starts, and whose events it records in ``log``. A stop signal goes
    to the process group of each worker. If ``stop_scope`` is ``"worker"``, a stop signal other than SIGKILL
    goes to the worker alone at first, and to the rest of its process group when the worker has exited. When a
    watched descriptor is readable, the thread that waits for events calls ``on_fd`` with it.
    """

    def __init__(self, *, stop_scope: str = "group") -> None:
        self._stop_scope = stop_scope
        self._turn = threading.Condition()
        self._waiter: int | None = None
        self.on_fd: Callable[[int], None] = lambda _fd: None
        self.log = EventLog()
        self._is_started = False
        self._failure: _core.StartFailed | None = None
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._supervisor: _core.Supervisor | None = _core.Supervisor()
        except BaseException:
            os.close(self._bell)
            raise
        self._supervisor.watch_fd(self._bell)

    def __del__(self) -> None:
        # The program never called `close`. The destructor of the supervisor kills the remaining processes.
        if getattr(self, "_supervisor", None) is not None:
            os.close(self._bell)

    # --- starting ---

    def start(self, specs: Sequence[_core.ProcessSpec], streams: Sequence[_core.LogStream] = ()) -> None:
        """Start all processes or none. Return when they run. The core copies ``streams`` to the console."""
        supervisor = self._running()
        if streams:
            supervisor.follow(streams)
        policy = _core.StopPolicy(signal.SIGTERM, GRACE)
        supervisor.start(_core.GroupSpec(specs, on_failure=policy, stop_scope=self._stop_scope))
        self.wait_until(lambda: self._is_started or self._failure is not None or self.log.end is not None)
        if self._failure is not None:
            text = f"the processes could not be started: {self._failure.message}"
            raise not_started(text, self._failure.errno)

    def adopt(self, pids: Mapping[int, int], statuses: Sequence[int]) -> None:
        """Monitor processes of another parent, before they run the functions. The parent writes their exit
        statuses to the pipes ``statuses``. Raise ``RuntimeError`` if one of them has already exited.
        """
        try:
            are_ours = adopt(self._running(), pids, statuses)
        except ProcessLookupError:
            are_ours = False
        if not are_ours:
            raise RuntimeError("a process exited before it could run its function")
        self.log.append(Adopted([pid for _, pid in sorted(pids.items())]))

    def watch_fd(self, fd: int) -> None:
        self._running().watch_fd(fd)

    def unwatch_fd(self, fd: int) -> None:
        if self._supervisor is not None:
            self._supervisor.unwatch_fd(fd)

    # --- waiting ---

    @property
    def has_ended(self) -> bool:
        return self.log.has_ended

    def wait(self, timeout: float) -> None:
        self.wait_until(lambda: self.has_ended, timeout)

    def wait_until(self, is_met: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait for a condition, for at most ``timeout`` seconds. Return true if it was met in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not is_met():
            left = None if deadline is None else deadline - time.monotonic()
            if self._supervisor is None:
                return is_met()
            was_something = self._advance(None if left is None else max(0.0, left))
            if left is not None and left <= (-LATE if was_something else 0):
                return is_met()
        return True

    def _advance(self, timeout: float | None) -> bool:
        """Handle one event. If another thread is handling events, wait for it. Return false on timeout."""
        me = threading.get_ident()
        with self._turn:
            if self._waiter not in {None, me}:
                return self._turn.wait(timeout)
            # A signal handler may call this method while the same thread is already executing it.
            outer, self._waiter = self._waiter, me
        try:
            supervisor = self._supervisor
            if supervisor is None:
                return False
            with waiting(lambda: os.eventfd_write(self._bell, 1)):
                event = supervisor.next_event(timeout)
                if event is not None:
                    self._record(event)
            return event is not None
        finally:
            with self._turn:
                self._waiter = outer
                self._turn.notify_all()

    def _record(self, event: _core.Event) -> None:
        if isinstance(event, _core.FdReady):
            if event.fd == self._bell:
                os.eventfd_read(self._bell)
            else:
                self.on_fd(event.fd)
        elif isinstance(event, _core.GroupStarted):
            self.log.append(event)
            self._is_started = True
        elif isinstance(event, _core.StartFailed):
            self._failure = event
        elif isinstance(event, _core.LogTrouble):
            logger.warning("log file %s: %s", event.path, os.strerror(event.errno))
        elif isinstance(event, _core.Degraded):
            logger.warning("%s", event.message)
        elif isinstance(event, (_core.FailureSeen, _core.WorkerExited, _core.GroupEnded)):
            self.log.append(event)

    # --- stopping ---

    def signal(self, signum: int, local_rank: int) -> None:
        if self._supervisor is not None and self.log.end is None:
            self._supervisor.signal(signum, [local_rank])

    def stop(self, death_sig: int, timeout: float) -> None:
        """Signal all processes, kill those that run after ``timeout`` seconds, and wait for their exits."""
        if self._supervisor is None or self.log.end is not None or self._failure is not None:
            return
        self._supervisor.stop(_core.StopPolicy(death_sig, max(0.0, timeout)))
        if self._is_started:
            self.wait_until(lambda: self.log.end is not None, max(0.0, timeout) + _END_SLACK)

    def hurry(self) -> None:
        """Kill all remaining processes immediately, so that :meth:`stop` can return."""
        if self._supervisor is not None:
            end_at_once(self._supervisor)

    def close(self) -> None:
        """Kill the remaining processes, print the remaining output, and release all resources. Idempotent."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        try:
            if self.log.end is not None:
                supervisor.drain(DRAIN_TIMEOUT)
        finally:
            supervisor.close()
            os.close(self._bell)
            with self._turn:
                self._turn.notify_all()

    def _running(self) -> _core.Supervisor:
        if self._supervisor is None:
            raise _core.SupervisorError("the group is closed")
        return self._supervisor


class SupervisedProcess:
    """One process of a group, with the interface of :class:`subprocess.Popen`. If it ``is_alone`` in the
    group, its end closes the group.
    """

    def __init__(
        self, group: SupervisedGroup, local_rank: int, args: Sequence[str], *, is_alone: bool = False
    ) -> None:
        self._group = group
        self._local_rank = local_rank
        self._is_alone = is_alone
        self.args = list(args)
        self.pid = group.log.pids[local_rank]

    @property
    def returncode(self) -> int | None:
        """Exit code, or the negative number of the signal; ``None`` until the exit is noticed."""
        ended = self._group.log.exits.get(self._local_rank)
        if ended is None:
            return None
        # The exit status may be unknown, which `Popen` cannot represent.
        return 255 if ended.exitcode is None else ended.exitcode

    def poll(self) -> int | None:
        self._group.wait(0.0)
        self._let_go()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._group.wait_until(lambda: self.returncode is not None, timeout)
        self._let_go()
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        # If the process has exited but its event is still to come, a signal would only reach its children.
        if self.poll() is None and not _has_exited(self.pid):
            self._group.signal(int(sig), self._local_rank)

    def terminate(self) -> None:
        self.send_signal(15)

    def kill(self) -> None:
        self.send_signal(9)

    def _let_go(self) -> None:
        # Do not wait for leftover processes here.
        if self._is_alone and self._group.log.end is not None:
            self._group.close()


def _has_exited(pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        return has_ended(pidfd, 0)
    finally:
        os.close(pidfd)


def has_ended(pidfd: int, patience: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(1000 * patience))


class _PolledExit(Value):
    """Exit of a program, with those fields of ``_core.WorkerExited`` from which a failure is described."""

    local_rank: int
    pid: int
    exitcode: int
    seen_ns: int
    sent_signal: int | None


class PolledGroup:
    """Group of programs that other code has started, so their exits are found by polling. ``handlers`` has an
    object for each program, by local rank, with the interface of torch's ``SubprocessHandler``: ``proc`` is
    like :class:`subprocess.Popen`, and ``close`` sends a signal.
    """

    def __init__(self, handlers: dict[int, Any]) -> None:
        self._handlers = handlers
        self._sent: dict[int, int] = {}
        self.log = EventLog()

    def add(self, local_rank: int, handler: Any) -> None:
        self._handlers[local_rank] = handler
        self.log.append(Adopted([each.proc.pid for each in self._handlers.values()]))

    @property
    def has_ended(self) -> bool:
        """True if all programs have exited, or if one has failed."""
        exits = self.log.exits
        return len(exits) == len(self._handlers) or any(each.exitcode for each in exits.values())

    def wait(self, timeout: float) -> None:
        """Wait for at most ``timeout`` seconds, and then record which programs have exited."""
        time.sleep(min(timeout, _LOOK))
        for rank, handler in self._handlers.items():
            if rank not in self.log.exits and (exitcode := handler.proc.poll()) is not None:
                seen = (time.monotonic_ns(), self._sent.get(rank))
                self.log.append(_PolledExit(rank, handler.proc.pid, exitcode, *seen), _core.WorkerExited)

    def stop(self, death_sig: int, timeout: float) -> None:
        """Send a signal to the programs, and SIGKILL to those that still run ``timeout`` seconds later. Then
        wait for their exits, but not forever.
        """
        self._send(death_sig)
        self._wait_for_exits(timeout)
        self.hurry()
        for rank in self._wait_for_exits(_KILL_LIMIT):
            logger.warning(
                "local rank %d (pid %d) did not exit within %g s after SIGKILL; it is left behind",
                *(rank, self._handlers[rank].proc.pid, _KILL_LIMIT),
            )

    def hurry(self) -> None:
        self._send(signal.SIGKILL)

    def close(self) -> None:
        """Do nothing, because the group holds no resources that could be released."""

    def _wait_for_exits(self, timeout: float) -> set[int]:
        deadline = time.monotonic() + timeout
        for handler in self._handlers.values():
            with suppress(subprocess.TimeoutExpired):
                handler.proc.wait(max(0.0, deadline - time.monotonic()))
        self.wait(0.0)
        return self._handlers.keys() - self.log.exits.keys()

    def _send(self, signum: int) -> None:
        self.wait(0.0)
        for rank in self._handlers.keys() - self.log.exits.keys():
            self._sent[rank] = signum
            with suppress(ProcessLookupError):
                self._handlers[rank].close(death_sig=signal.Signals(signum))
