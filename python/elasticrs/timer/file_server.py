"""A server of timers over a FIFO, for programs that have no agent of ours."""

from __future__ import annotations

import errno
import heapq
import json
import math
import os
import select
import signal
import stat
import time
from threading import Thread

from elasticrs.timer.api import SteadyClock, _logger, descends_from_us
from elasticrs.timer.debug_info_logging import log_debug_info_for_expired_timers
from elasticrs.timer.file_based_local_timer import FileTimerRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["FileTimerServer"]

_CHUNK = 65536
_MAX_DRAIN = 1 << 20
_MAX_LINE = 4096
_MAX_TIMERS = 16384


class FileTimerServer:
    """Ends descendants of this process whose timers have expired.

    Different from torch: a timer expires when it is due, not up to ``max_interval`` later; the FIFO is made
    for this user alone; what is at ``file_path`` already is an error, unless it is such a FIFO, of this user,
    that nobody reads; only descendants of this process are ever signalled, and **not this process itself**;
    :meth:`stop` leaves no thread.

    Args:
        file_path: where the FIFO is made.
        run_id: the name of the job, for the log.
        max_interval: longest wait of the thread, in seconds.
        daemon: whether the thread lets the process end.
        log_event: gets ``"watchdog started"``, ``"watchdog stopped"``, ``"timer expired"`` and
            ``"kill worker process"``, the last two with the request.

    Raises:
        FileExistsError: something else is at ``file_path``.
        OSError: the FIFO cannot be made.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        self._file_path = os.fspath(file_path)
        self._run_id = run_id
        self._max_interval = max_interval
        self._daemon = daemon
        self._log_event = log_event or (lambda _name, _request: None)
        self._timers: dict[tuple[int, str], FileTimerRequest] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._pidfds: dict[int, int] = {}
        self._clock = SteadyClock()
        self._partial = b""
        self._skipping = False
        self._request_count = 0
        self._refused: dict[str, int] = {}
        self._run_once = False
        self._stop_signaled = False
        self._watchdog_thread: Thread | None = None
        self._last_progress_time = int(time.time())
        self._fd = _make_fifo(self._file_path)
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def start(self) -> None:
        """Begin to serve, in a thread."""
        self._watchdog_thread = Thread(
            target=self._watchdog_loop, name="FileTimerServer", daemon=self._daemon
        )
        self._watchdog_thread.start()
        self._log_event("watchdog started", None)

    def stop(self) -> None:
        """End the thread, and remove the FIFO. Idempotent."""
        if self._fd < 0:
            return
        self._stop_signaled = True
        self._end()
        self._log_event("watchdog stopped", None)

    def run_once(self) -> None:
        """Carry out the requests that are in the FIFO now, and return."""
        if self._fd >= 0:
            self._run_once = True
            self._end()

    def _end(self) -> None:
        os.write(self._wake_writer, b"x")
        thread, self._watchdog_thread = self._watchdog_thread, None
        if thread is not None:
            thread.join()
        found = os.fstat(self._fd)
        try:
            there = os.lstat(self._file_path)
            if (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino):
                os.remove(self._file_path)
        except FileNotFoundError:
            _logger().debug("somebody has removed %s already", self._file_path)
        for fd in (self._fd, self._wake_reader, self._wake_writer, *self._pidfds.values()):
            os.close(fd)
        self._pidfds.clear()
        self._fd = -1

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Return true if there is a process with this pid that this one may signal.

        Args:
            pid: any number above 0.
        """
        try:
            os.kill(pid, 0)
        except (OSError, OverflowError):
            return False
        return True

    def get_last_progress_time(self) -> int:
        """Return when the thread last ran its loop, in whole seconds since 1970."""
        return self._last_progress_time

    # --- the thread ---

    def _watchdog_loop(self) -> None:
        while not self._stop_signaled:
            run_once = self._run_once
            try:
                self._wait(0.0 if run_once else self._seconds_to_wait())
                self._run_watchdog()
            except Exception:
                _logger().exception("a turn of the timer server failed")
                # What fails at once, and always, must not keep a core busy.
                time.sleep(min(self._max_interval, 0.1))
            self._last_progress_time = int(time.time())
            if run_once:
                return

    def _seconds_to_wait(self) -> float:
        while self._deadlines and not self._is_current(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        left = self._deadlines[0][0] - self._clock.now() if self._deadlines else math.inf
        return max(0.0, min(left, self._max_interval))

    def _is_current(self, entry: tuple[float, int, str]) -> bool:
        due, pid, scope = entry
        timer = self._timers.get((pid, scope))
        return timer is not None and timer.expiration_time == due

    def _wait(self, seconds: float) -> None:
        poll = select.poll()
        for fd in (self._fd, self._wake_reader, *self._pidfds.values()):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(math.ceil(seconds * 1000))}
        self._forget(pid for pid, fd in list(self._pidfds.items()) if fd in ready)

    def _run_watchdog(self) -> None:
        # All that was written before a deadline counts before it.
        self.register_timers(self._get_requests())
        all_expired = self.get_expired_timers(self._clock.now())
        log_debug_info_for_expired_timers(
            self._run_id, {pid: [timer.to_json() for timer in timers] for pid, timers in all_expired.items()}
        )
        for pid, timers in all_expired.items():
            self._expire(pid, sorted(timers, key=lambda timer: timer.expiration_time))
        if all_expired:
            self.clear_timers(set(all_expired))

    def _expire(self, pid: int, timers: list[FileTimerRequest]) -> None:
        for timer in timers:
            self._log_event("timer expired", timer)
            if timer.signal > 0:
                if self._reap_worker(pid, timer.signal):
                    self._log_event("kill worker process", timer)
                return

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        """Signal a descendant; return true if that was done."""
        pidfd = self._bind(worker_pid)
        if pidfd is None:
            _logger().warning("pid %s has ended, or is not a descendant of this process", worker_pid)
            return False
        return _send(pidfd, worker_pid, signal)

    def _bind(self, pid: int) -> int | None:
        """A descriptor of the process, if that is a descendant of this one."""
        if pid not in self._pidfds:
            try:
                pidfd = os.pidfd_open(pid)
            except (OSError, OverflowError, ValueError):
                return None
            if not descends_from_us(pid):
                os.close(pidfd)
                return None
            self._pidfds[pid] = pidfd
        return self._pidfds[pid]

    def _forget(self, pids: Iterable[int]) -> None:
        for pid in pids:
            os.close(self._pidfds.pop(pid))
            for key in [key for key in self._timers if key[0] == pid]:
                del self._timers[key]

    # --- requests ---

    def _get_requests(self) -> list[FileTimerRequest]:
        requests: list[FileTimerRequest] = []
        left = _MAX_DRAIN
        while left > 0:
            try:
                chunk = os.read(self._fd, _CHUNK)
            except BlockingIOError:
                break
            left -= max(1, len(chunk))
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            for line in lines:
                if self._skipping or len(line) > _MAX_LINE:
                    self._skipping = False
                    self._refuse("it has more than 4096 bytes")
                else:
                    requests.extend(self._parse(line))
            if len(self._partial) > _MAX_LINE:
                self._partial, self._skipping = b"", True
        return requests

    def _parse(self, line: bytes) -> Iterable[FileTimerRequest]:
        try:
            request = _request(line)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            self._refuse("it is not a timer record")
            # A writer died within its record, and another one's follows. No JSON text holds this.
            begin = line.rfind(b'{"version"')
            return self._parse(line[begin:]) if begin > 0 else ()
        if request.expiration_time >= 0 and self._bind(request.worker_pid) is None:
            # As a rule it wrote and ended. Whoever is there, and no descendant, is not to be signalled.
            if self.is_process_running(request.worker_pid):
                self._refuse(f"pid {request.worker_pid} is not a descendant of this process")
            return ()
        return (request,)

    def _refuse(self, why: str) -> None:
        kind = why if "pid" not in why else "pid"
        self._refused[kind] = self._refused.get(kind, 0) + 1
        if self._refused[kind] == 1:
            _logger().warning("a timer record was refused (further ones are only counted): %s", why)

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        """Carry out requests; a negative expiration time is a release.

        Args:
            timer_requests: in their order.
        """
        for request in timer_requests:
            self._request_count += 1
            key = (request.worker_pid, request.scope_id)
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            elif key in self._timers or len(self._timers) < _MAX_TIMERS:
                request.expiration_time = self._clock.steady(request.expiration_time)
                self._timers[key] = request
                heapq.heappush(self._deadlines, (request.expiration_time, *key))
        if len(self._deadlines) > 2 * len(self._timers) + 64:
            # What was released or replaced stays in a heap until it is due.
            self._deadlines = [(timer.expiration_time, *key) for key, timer in self._timers.items()]
            heapq.heapify(self._deadlines)

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Remove all timers of these processes, and of those that have ended.

        Args:
            worker_pids: who.
        """
        for pid, scope in list(self._timers):
            if pid in worker_pids or not self.is_process_running(pid):
                del self._timers[pid, scope]

    def get_expired_timers(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        """The timers that are due, by pid.

        Args:
            deadline: in seconds since 1970; what expires then or earlier is due.
        """
        expired: dict[int, list[FileTimerRequest]] = {}
        for timer in self._timers.values():
            if timer.expiration_time <= deadline:
                expired.setdefault(timer.worker_pid, []).append(timer)
        return expired


def _request(line: bytes) -> FileTimerRequest:
    fields = json.loads(line)
    pid, expires, signum = fields["pid"], fields["expiration_time"], fields["signal"]
    if fields["version"] != 1 or type(pid) is not int or type(signum) is not int or pid <= 0:
        raise ValueError("not a record of version 1")
    if type(fields["scope_id"]) is not str or not math.isfinite(expires) or signum > signal.SIGRTMAX:
        raise ValueError("not a record of version 1")
    return FileTimerRequest(pid, fields["scope_id"], expires, signum)


def _send(pidfd: int, pid: int, signum: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        _logger().info("pid %s has ended meanwhile", pid)
    except OSError:
        _logger().exception("pid %s could not be signalled", pid)
        return False
    return True


def _make_fifo(path: str) -> int:
    """Make it, or take over an abandoned one; returns it, open for both directions."""
    try:
        os.mkfifo(path, 0o600)
    except FileExistsError:
        there = os.lstat(path)
        # What a server that was killed has left. One that is open to others was made by somebody else.
        if there.st_mode != stat.S_IFIFO | 0o600 or there.st_uid != os.geteuid():
            raise
        _check_that_nobody_reads(path)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)


def _check_that_nobody_reads(path: str) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ENXIO:
            return
        raise
    raise OSError(errno.EBUSY, "another timer server reads it", path)
