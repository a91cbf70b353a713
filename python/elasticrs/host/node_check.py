"""Run the user's command that checks whether this node can run workers (``--node-check``)."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from functools import partial

from elasticrs.host.background_call import Asked
from elasticrs.job.value import Value
from elasticrs.report.phrases import how_it_ended

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_OUTPUT = 65536
"""Number of bytes that are kept of a command's output. The beginning of a longer output is dropped."""
MAX_LINES = 20
"""Maximum number of lines of the output that are shown to the user."""


class NodeCheckResult(Value):
    """Result of a check.

    Args:
        unfit: reason why this node cannot run workers; ``None`` if it can, or if the check gave no answer.
        problem: reason why the check gave no answer; ``None`` if it did.
        lines: last lines of the command's output.
    """

    unfit: str | None = None
    problem: str | None = None
    lines: tuple[str, ...] = ()


class NodeCheck:
    """One run of the command, on a thread of its own.

    Args:
        command: program and its arguments.
        timeout: seconds after which the command is killed. A check that hangs is no proof that the node is
            broken, so the node counts as fit.

    Attributes:
        fd: file descriptor that is readable when the command has finished.

    Raises:
        OSError: the process has run out of file descriptors.
        RuntimeError: no thread can be started.
    """

    def __init__(self, command: Sequence[str], timeout: float) -> None:
        self._cancelled = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._call = Asked(partial(_run, command, timeout, self._cancelled))
        except BaseException:
            os.close(self._cancelled)
            raise
        self.fd = self._call.fd

    def cancel(self) -> None:
        """Kill the command. :attr:`fd` becomes readable soon."""
        os.eventfd_write(self._cancelled, 1)

    def finish(self) -> NodeCheckResult:
        """Wait until the command has finished, release all resources, and return the result."""
        try:
            self._call.wait()
            result: NodeCheckResult = self._call.take()
        finally:
            self._call.close()
            os.close(self._cancelled)
        return result


def _run(command: Sequence[str], timeout: float, cancelled: int) -> NodeCheckResult:
    try:
        process = _start(command)
    except OSError as error:
        return NodeCheckResult(problem=f"the node check could not be started: {error.strerror}")
    try:
        output, problem = _watch(process, timeout, cancelled)
    finally:
        _kill(process)
    lines = tuple(output.decode("utf-8", "replace").splitlines()[-MAX_LINES:])
    if problem is not None:
        return NodeCheckResult(problem=problem, lines=lines)
    if process.returncode == 0:
        return NodeCheckResult(lines=lines)
    return NodeCheckResult(unfit=f"the node check {how_it_ended(process.returncode)}", lines=lines)


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    # Unblock all signals, which are blocked in this thread, because the command inherits the mask.
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _watch(process: subprocess.Popen[bytes], timeout: float, cancelled: int) -> tuple[bytes, str | None]:
    """Read a command's output until the command exits or has to be killed. Return the output, and the reason
    for killing the command; ``None`` if it exited.
    """
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
                return output, "the node check was cancelled"
            if not ready or time.monotonic() > end:
                return output, f"the node check did not finish within {timeout:g} s and was killed"
            if stdout in ready:
                part = os.read(stdout, MAX_OUTPUT)
                output = (output + part)[-MAX_OUTPUT:]
                if not part:
                    poll.unregister(stdout)
            elif pidfd in ready:
                # Do not wait for the end of the output, because a process that the command has left behind
                # may keep it open.
                return output, None
    finally:
        os.close(pidfd)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and the processes that it has left in its process group.

    The command has not been reaped yet, so its process group id cannot have been reused.
    """
    try:
        os.killpg(process.pid, signal.SIGKILL)
    finally:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    # If this process is a subreaper, it is now the parent of the processes that the command has left behind.
    try:
        while True:
            os.waitid(os.P_PGID, process.pid, os.WEXITED)
    except ChildProcessError:
        return
