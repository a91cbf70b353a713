"""Runs the checks that decide whether this node can run workers (``--node-check``).

A check is a user's command or :mod:`.nvml_check`. It runs in a child process. The last line of output of
``nvml_check`` is the reason. If it raises an exception, there is no answer, because a failed check says
nothing about the node.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from functools import partial

from elasticrs._engine.job.phrases import how_it_ended, printable
from elasticrs._engine.job.value import Value
from elasticrs._engine.process.background_call import BackgroundCall
from elasticrs._engine.process.other_processes import command as program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticrs._engine.job.config import HealthSource

UNFIT = 10
"""Exit code of :mod:`.nvml_check` for an unfit node. Python itself exits with 1 after an exception."""

MAX_OUTPUT = 65536
"""Maximum number of bytes of a check's output that are kept. Of a longer output, the beginning is dropped."""
MAX_LINES = 20
MAX_LINE = 300
EXIT_LIMIT = 2.0
"""Seconds to wait for a killed command. It may hang in a driver, or run on as another user (``sudo``)."""
_PAUSE = 0.01

_STOPPED = frozenset(
    code
    for signum in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for code in (-signum, 128 + signum)
)
"""Return codes of a killed check, which has no result. A shell returns 128 plus the signal number."""


class NodeCheckResult(Value):
    """Result of a check. ``problem`` is set if there is no answer, ``unfit`` if the node is unfit.
    ``lines`` are the last lines of the output, without the line that became the reason.
    """

    title: str = "node check"
    unfit: str | None = None
    problem: str | None = None
    lines: tuple[str, ...] = ()


class NodeCheck:
    """Runs all checks at once. ``fd`` is readable when they have finished. The constructor raises ``OSError``
    if no file descriptor is free, and ``RuntimeError`` if no thread can be started.
    A check that exceeds ``timeout`` seconds is killed. That does not prove that the node is broken.
    """

    def __init__(self, sources: Sequence[HealthSource], timeout: float) -> None:
        self._cancelled = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._call = BackgroundCall(partial(_run_all, sources, timeout, self._cancelled))
        except BaseException:
            os.close(self._cancelled)
            raise
        self.fd = self._call.fd

    def cancel(self) -> None:
        os.eventfd_write(self._cancelled, 1)

    def finish(self) -> list[NodeCheckResult]:
        """Wait for all checks, release all resources, and return the results."""
        try:
            self._call.wait()
            results: list[NodeCheckResult] = self._call.take()
        finally:
            self._call.close()
            os.close(self._cancelled)
        return results


def _run_all(sources: Sequence[HealthSource], timeout: float, cancelled: int) -> list[NodeCheckResult]:
    calls: list[BackgroundCall] = []
    try:
        for source in sources:
            calls.append(BackgroundCall(partial(_run, source, timeout, cancelled)))  # noqa: PERF401 -- close them all
        for call in calls:
            call.wait()
        return [call.take() for call in calls]
    except (OSError, RuntimeError) as error:
        # Cancel the checks. Otherwise, the ``finally`` block would wait until each check exits or times out.
        os.eventfd_write(cancelled, 1)
        return [NodeCheckResult(problem=f"the node checks could not be started: {error}")]
    finally:
        for call in calls:
            call.wait()
            call.close()


def _run(source: HealthSource, timeout: float, cancelled: int) -> NodeCheckResult:
    title = "node check" if source.words else source.title
    try:
        # Start a helper, which kills the check's command if this process dies before the command ends.
        guard = _start(
            program("elasticrs._engine.process.other_processes"), subprocess.PIPE, subprocess.DEVNULL
        )
        try:
            process = _start(_command(source), subprocess.DEVNULL, subprocess.PIPE)
        except OSError:
            _dismiss(guard)
            raise
        try:
            _tell(guard, process.pid)
            output, problem = _watch(process, timeout, cancelled)
        finally:
            has_exited = _end(process, guard)
    except OSError as error:
        return NodeCheckResult(title, problem=f"{source.title} could not be run: {error.strerror}")
    if problem is not None:
        problem += " and was killed" if has_exited else f", and process {process.pid} cannot be killed"
    text = output.decode("utf-8", "replace").splitlines()[-MAX_LINES:]
    lines = tuple(line if len(line) <= MAX_LINE else line[:MAX_LINE] + "…" for line in text)
    if problem is not None:
        return NodeCheckResult(title, problem=f"{source.title} {problem}", lines=lines)
    if process.returncode == 0:
        return NodeCheckResult(title, lines=lines)
    how = f"{source.title} {how_it_ended(process.returncode)}"
    if process.returncode in _STOPPED:
        return NodeCheckResult(title, problem=how, lines=lines)
    if source.words:
        return NodeCheckResult(title, unfit=how, lines=lines)
    reason = f"{source.title}: {printable(lines[-1])}" if lines and process.returncode > 0 else how
    is_unfit = process.returncode == UNFIT
    return NodeCheckResult(title, reason if is_unfit else None, None if is_unfit else reason, lines[:-1])


def _command(source: HealthSource) -> list[str]:
    return list(source.words) or program("elasticrs._engine.gpus.nvml_check")


def _start(command: Sequence[str], stdin: int, stdout: int) -> subprocess.Popen[bytes]:
    # Unblock all signals for now, because the command inherits the signal mask of this thread.
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        return subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=subprocess.STDOUT, start_new_session=True
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _tell(guard: subprocess.Popen[bytes], group: int) -> None:
    assert guard.stdin is not None
    try:
        os.write(guard.stdin.fileno(), str(group).encode())
    except BrokenPipeError:
        return  # The guard was killed. Continue, because it is needed only if this process dies.


def _dismiss(guard: subprocess.Popen[bytes]) -> None:
    guard.kill()
    guard.wait()
    assert guard.stdin is not None
    guard.stdin.close()


def _watch(process: subprocess.Popen[bytes], timeout: float, cancelled: int) -> tuple[bytes, str | None]:
    """Return the output, and the reason for killing the command (``None`` if it exited by itself)."""
    assert process.stdout is not None
    stdout, pidfd = process.stdout.fileno(), os.pidfd_open(process.pid)
    os.set_blocking(stdout, False)
    output, end = b"", time.monotonic() + timeout
    poll = select.poll()
    for fd in (stdout, pidfd, cancelled):
        poll.register(fd, select.POLLIN)
    try:
        while True:
            ready = dict(poll.poll(max(0.0, end - time.monotonic()) * 1000))
            if cancelled in ready:
                return output, "was cancelled"
            if not ready or time.monotonic() > end:
                return output, f"did not finish within {timeout:g} s"
            if stdout in ready:
                part = os.read(stdout, MAX_OUTPUT)
                output = (output + part)[-MAX_OUTPUT:]
                if not part:
                    poll.unregister(stdout)
            elif pidfd in ready:
                # A leftover process of the command may keep the pipe open, so EOF may never come.
                return output, None
    finally:
        os.close(pidfd)


def _end(process: subprocess.Popen[bytes], guard: subprocess.Popen[bytes]) -> bool:
    """Kill the process group. Return false if the command has not exited after :data:`EXIT_LIMIT` seconds.
    The command has not been reaped yet, so its process group id cannot have been reused.
    """
    _kill_group(process.pid)
    _dismiss(guard)
    try:
        process.wait(EXIT_LIMIT)
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.stdout is not None:
            process.stdout.close()
    _reap_group(process.pid)
    return True


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except PermissionError:
        return  # The remaining processes belong to another user, so this process cannot kill them.


def _reap_group(group: int) -> None:
    """Reap leftover processes. They are children of this process only if it is a subreaper."""
    end = time.monotonic() + EXIT_LIMIT
    try:
        while time.monotonic() < end:
            if os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG) is None:
                time.sleep(_PAUSE)
    except ChildProcessError:
        return
