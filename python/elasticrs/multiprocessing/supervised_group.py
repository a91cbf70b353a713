"""A group of processes under a supervisor of its own: what stands behind every ``PContext``.

The core starts, watches and ends the processes; this module takes in what it tells. A group may be used from
any thread, and from several: one of them waits for the core, the others for that one.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from typing import TYPE_CHECKING

from elasticrs import _core
from elasticrs.multiprocessing.interrupts import waiting
from elasticrs.multiprocessing.not_started import not_started
from elasticrs.workers import adopt, end_at_once

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DRAIN_TIMEOUT = 10.0
"""Seconds that a slow console gets at the end; the files have everything in any case."""

LATE = 1.0
"""Seconds after the end of a wait within which what has happened already is taken in: where a descriptor is
always ready, there is more of it for ever."""

_END_SLACK = 45.0
"""Seconds beyond the grace after which the group is given up: the core itself gives up after 30."""


class SupervisedGroup:
    """Starts processes, and records how they end.

    Args:
        grace: seconds between SIGTERM and SIGKILL for the others when one fails.
        stop_scope: whom signals reach before SIGKILL: ``"worker"``, and the rest of its process group when it
            has ended, or ``"group"``.

    Attributes:
        pids: by local rank.
        exits: by local rank, in the order in which they were seen.
        first_failure: the local rank that failed first.
        end: what was told when nothing was left.
        on_fd: called, in whichever thread waits, with a descriptor that :meth:`watch_fd` watches and that is
            readable.

    Raises:
        _core.SupervisorError: there is no supervisor to be had.
        OSError: descriptors ran out.
    """

    def __init__(self, grace: float = 30.0, *, stop_scope: str = "group") -> None:
        self._grace = grace
        self._stop_scope = stop_scope
        self._turn = threading.Condition()
        self._waiter: int | None = None
        self.on_fd: Callable[[int], None] = lambda _fd: None
        self.pids: dict[int, int] = {}
        self.exits: dict[int, _core.WorkerExited] = {}
        self.first_failure: int | None = None
        self.end: _core.GroupEnded | None = None
        self._is_started = False
        self._trouble: list[str] = []
        self._failure: _core.StartFailed | None = None
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._supervisor: _core.Supervisor | None = _core.Supervisor()
        except BaseException:
            os.close(self._bell)
            raise
        self._supervisor.watch_fd(self._bell)

    def __del__(self) -> None:
        # Nobody has closed it: the core ends what is left of its own.
        if getattr(self, "_supervisor", None) is not None:
            os.close(self._bell)

    # --- starting ---

    def start(self, specs: Sequence[_core.ProcessSpec], streams: Sequence[_core.LogStream] = ()) -> None:
        """Start all, or none; returns when all run. ``streams`` are copied to the console meanwhile.

        Raises:
            OSError: a program or a file cannot be had.
            _core.SupervisorError: see the class.
        """
        supervisor = self._running()
        if streams:
            supervisor.follow(streams)
        policy = _core.StopPolicy(15, self._grace)
        supervisor.start(_core.GroupSpec(specs, on_failure=policy, stop_scope=self._stop_scope))
        self.wait_until(lambda: self._is_started or self._failure is not None or self.end is not None)
        if self._failure is not None:
            text = f"the processes could not be started: {self._failure.message}"
            raise not_started(text, self._failure.errno)

    def adopt(self, pids: Mapping[int, int], statuses: Sequence[int]) -> None:
        """Adopt processes that another process has started and that wait to begin; after :meth:`start`.

        Args:
            pids: by local rank.
            statuses: by local rank, the pipe into which their parent writes their exit status.

        Raises:
            RuntimeError: one has ended already.
        """
        try:
            are_ours = adopt(self._running(), pids, statuses)
        except ProcessLookupError:
            are_ours = False
        if not are_ours:
            raise RuntimeError("a process ended before it could run its function")
        self.pids.update(pids)

    def watch_fd(self, fd: int) -> None:
        """Call :attr:`on_fd` while ``fd`` is readable, until :meth:`unwatch_fd`."""
        self._running().watch_fd(fd)

    def unwatch_fd(self, fd: int) -> None:
        """End what :meth:`watch_fd` began."""
        if self._supervisor is not None:
            self._supervisor.unwatch_fd(fd)

    # --- waiting ---

    def poll(self) -> None:
        """Record what has happened; never waits."""
        self.wait_until(lambda: self.end is not None, 0.0)

    def wait_until(self, is_met: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait for a condition on what is recorded here, for ever when ``timeout`` is ``None``; True if it is
        met.
        """
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
        """Take in one event, or wait until another thread has; ``False`` when there was none."""
        me = threading.get_ident()
        with self._turn:
            if self._waiter not in {None, me}:
                return self._turn.wait(timeout)
            # A handler of a signal that came while this thread waited may come here again.
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
            self.pids.update(enumerate(event.pids))
            self._is_started = True
        elif isinstance(event, _core.StartFailed):
            self._failure = event
        elif isinstance(event, _core.FailureSeen):
            self.first_failure = event.local_rank
        elif isinstance(event, _core.WorkerExited):
            self.exits[event.local_rank] = event
        elif isinstance(event, _core.GroupEnded):
            self.end = event
        elif isinstance(event, _core.LogTrouble):
            self._trouble.append(f"log file {event.path}: {os.strerror(event.errno)}")
        elif isinstance(event, _core.Degraded):
            self._trouble.append(event.message)

    def take_trouble(self) -> list[str]:
        """Return the lines for the user since the last call."""
        taken, self._trouble = self._trouble, []
        return taken

    # --- ending ---

    def signal(self, signum: int, local_rank: int) -> None:
        """Send a signal to one process, or to its process group; nothing when it has ended."""
        if self._supervisor is not None and self.end is None:
            self._supervisor.signal(signum, [local_rank])

    def stop(self, death_sig: int, timeout: float) -> None:
        """Signal all, and SIGKILL what is there after ``timeout`` seconds; returns when nothing is left."""
        if self._supervisor is None or self.end is not None or self._failure is not None:
            return
        self._supervisor.stop(_core.StopPolicy(death_sig, max(0.0, timeout)))
        if self._is_started:
            self.wait_until(lambda: self.end is not None, max(0.0, timeout) + _END_SLACK)

    def hurry(self) -> None:
        """Kill all now that :meth:`stop` waits for."""
        if self._supervisor is not None:
            end_at_once(self._supervisor)

    def close(self) -> None:
        """Kill what is left, show what is not on the console yet, and give everything back. Idempotent."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        try:
            if self.end is not None:
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
    """One process of a group, as :class:`subprocess.Popen` shows one.

    Args:
        group: of which it is a member.
        local_rank: its index there.
        args: its command.
        is_alone: it is the only one, and the group is closed by whoever sees here that nothing of it is left.
    """

    def __init__(
        self, group: SupervisedGroup, local_rank: int, args: Sequence[str], *, is_alone: bool = False
    ) -> None:
        self._group = group
        self._local_rank = local_rank
        self._is_alone = is_alone
        self.args = list(args)
        self.pid = group.pids[local_rank]

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negative number of a signal; ``None`` while it runs, as far as was looked."""
        ended = self._group.exits.get(self._local_rank)
        if ended is None:
            return None
        # Popen has no word for "nobody can tell"; this is never a success.
        return 255 if ended.exitcode is None else ended.exitcode

    def poll(self) -> int | None:
        """Look; see :attr:`returncode`."""
        self._group.poll()
        self._let_go()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; return the code.

        Raises:
            subprocess.TimeoutExpired: it runs still after ``timeout`` seconds.
        """
        self._group.wait_until(lambda: self.returncode is not None, timeout)
        self._let_go()
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal to it, or to its process group; nothing when it has ended."""
        if self.poll() is None:
            self._group.signal(int(sig), self._local_rank)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(15)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(9)

    def _let_go(self) -> None:
        # What it has left behind may go on for a while, and nobody waits for that here.
        if self._is_alone and self._group.end is not None:
            self._group.close()
