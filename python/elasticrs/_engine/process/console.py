"""The agent's console, which writes lines to stderr without making the agent wait for the reader.

A console whose reader has stopped (a stopped terminal, a full pipe, a file on a network file system) must not
delay a restart. The file descriptor cannot be made non-blocking, because the workers share it. A poll before
a write does not help either, because a worker may fill the pipe in between. The agent therefore writes each
line with ``RWF_NOWAIT``, which pipes and sockets support. If this write fails because it would block, a
thread writes the line. The thread exists only while lines are queued.
"""

from __future__ import annotations

import _thread
import errno
import os
import select
import signal
import sys
import time
from collections import deque

from elasticrs._engine.job.phrases import NAME, local_time, visible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Number of bytes that the kernel writes to a pipe atomically.
_PIPE_BUF = 4096
_NO_WAIT = 8
"""Value of the flag ``RWF_NOWAIT`` of ``pwritev2``."""
_NOT_AT_ONCE = frozenset((
    *(errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ESPIPE, errno.EINTR),
    # A system call filter (seccomp) forbids `pwritev2`.
    errno.EPERM,
))  # fmt: skip
"""Error numbers of a non-blocking write after which a blocking write may still succeed."""
_KEPT = 1000
_MOMENT = 0.002
"""Maximum number of seconds to wait until a line is written. The wait keeps the lines of the agent in order
with the lines of the workers. The wait is shorter if the reader is reading.
"""
END_PATIENCE = 1.0
"""Maximum number of seconds to wait for the last lines at the end of a job."""

_LOOK = 0.02
"""Seconds between two polls of the file descriptor that can interrupt a wait for the reader."""


DESCRIPTORS = {"stdout": 1, "stderr": 2}


def descriptors(std: str) -> set[int]:
    """Return the file descriptors of a stream: the one that C code and child processes use and, if different,
    the one that Python's stream uses.
    """
    usual = DESCRIPTORS[std]
    try:
        return {usual, int(getattr(sys, std).fileno())}
    except (AttributeError, OSError, ValueError):
        return {usual}


def prefix(time_ns: int | None = None, node: str = "", group_rank: int | None = None) -> str:
    """Return the prefix of a console line: ``elasticrs: ``, or ``elasticrs[time node:pid group rank]: `` with
    the parts that are known.

    Args:
        time_ns: wall-clock time of the line, in nanoseconds since 1970; ``None`` for a line without a time.
        node: name of the node and pid of the agent.
        group_rank: group rank of the node.
    """
    parts = []
    if time_ns is not None:
        parts.append(local_time(time_ns, "T", has_milliseconds=True))
    if node:
        parts.append(node)
    if group_rank is not None:
        parts.append(f"group {group_rank}")
    return f"{NAME}[{' '.join(parts)}]: " if parts else f"{NAME}: "


def has_time(log_prefix: str | None, fd: int) -> bool:
    """Return true if lines written to this file descriptor have a timestamp in their prefix.

    Args:
        log_prefix: value of ``--log-prefix``; the value of ``PET_LOG_PREFIX`` if ``None``.
        fd: file descriptor. With ``auto``, lines on a terminal have no time.
    """
    if log_prefix is None:
        log_prefix = os.environ.get("PET_LOG_PREFIX")
    return log_prefix == "time" or (log_prefix != "none" and not os.isatty(fd))


class Console:
    """Adds a prefix to lines, and writes them to a file descriptor. If a write would block, a thread writes.

    Args:
        fd: file descriptor to write to.
        log_prefix: see :func:`has_time`.
        is_one_of_several: true if the agents of several nodes may share a console. In this case, the prefix
            contains the name of the node and the pid of the agent.

    Attributes:
        group_rank: group rank of the node, which is part of the prefix; ``None`` while the node has none.
    """

    __slots__ = (
        *("_fd", "_has_time", "_is_gone", "_is_late", "_is_writing", "_lines", "_lock", "_node", "_writing"),
        "group_rank",
    )

    def __init__(
        self, fd: int = 2, log_prefix: str | None = None, *, is_one_of_several: bool = False
    ) -> None:
        self._fd = fd
        self._has_time = has_time(log_prefix, fd)
        self._node = f"{os.uname().nodename}:{os.getpid()}" if is_one_of_several else ""
        self.group_rank: int | None = None
        self._lines: deque[bytes] = deque()
        self._is_gone = self._is_late = self._is_writing = False
        self._lock = _thread.allocate_lock()
        # Lock that is held while the thread exists.
        self._writing = _thread.allocate_lock()

    @property
    def waiting(self) -> int:
        """Number of lines that have not been written yet."""
        return 0 if self._is_gone else len(self._lines)

    def prefixed(self, text: str) -> str:
        """Prepend the console prefix to a text, with the current time if lines show a time."""
        return prefix(time.time_ns() if self._has_time else None, self._node, self.group_rank) + text

    def say(self, text: str) -> None:
        """Write one line with the prefix. Queue the line if the reader has stopped reading. Truncate the line
        if it is too long for a single atomic write to a pipe.
        """
        line = _encode(self.prefixed(" ".join(text[:_PIPE_BUF].splitlines())))
        if self.waiting < _KEPT:
            self._put([_whole(line, _PIPE_BUF - 1) + b"\n"])
        if not self._is_late:
            self._is_late = not self.flush(_MOMENT)

    def flush(self, seconds: float) -> bool:
        """Wait until all lines are written, for at most ``seconds``. Return false on timeout."""
        if self._writing.acquire(timeout=seconds):
            self._writing.release()
        return not self.waiting

    def write(
        self,
        text: str,
        patience: float,
        wake_fd: int | None = None,
        is_enough: Callable[[], bool] = lambda: True,
        paint: Callable[[str], str] = lambda text: text,
    ) -> bool:
        """Write the queued lines, followed by a text of any length. Wait until everything is written.

        Args:
            text: text to write. Control characters in it are made visible.
            patience: maximum number of seconds to wait while the reader does not read.
            wake_fd: file descriptor that can interrupt the wait when it is readable.
            is_enough: called when ``wake_fd`` is readable; returns true to interrupt the wait.
            paint: adds colours to the text; called only if the console shows colours.

        Returns:
            False if the wait was interrupted or timed out before everything was written.
        """
        shown = visible(text)
        data = (paint(shown) if self._has_colours() else shown).encode("utf-8", "backslashreplace")
        self._put(data[start : start + _PIPE_BUF] for start in range(0, len(data), _PIPE_BUF))
        waking = select.poll()
        if wake_fd is not None:
            waking.register(wake_fd, select.POLLIN)
        left, deadline = self.waiting, time.monotonic() + patience
        while not self.flush(0.0 if self._is_late and not patience else _LOOK if patience else _MOMENT):
            if self.waiting != left:
                left, deadline = self.waiting, time.monotonic() + patience
            if time.monotonic() >= deadline or (waking.poll(0) and is_enough()):
                self._is_late = True
                return False
        return True

    def _has_colours(self) -> bool:
        """Return true if the console is a terminal that shows colours, and the user has not turned them off
        (``NO_COLOR``).
        """
        environ = os.environ
        return not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb" and os.isatty(self._fd)

    def _put(self, lines: Iterable[bytes]) -> None:
        with self._lock:
            self._lines.extend(lines)
            if self._is_writing:
                return
            self._write_at_once()
            if self._is_gone or not self._lines:
                return
            self._is_writing = True
            self._writing.acquire()
        try:
            _thread.start_new_thread(self._work, ())
        except RuntimeError:
            # Write the lines in the calling thread, because the process has reached its limit on threads.
            self._work()

    def _write_at_once(self) -> None:
        """Write queued lines until all are written or a write would block."""
        while self._lines and not self._is_gone:
            line = self._lines[0]
            try:
                # Offset -1 selects the current position of the file descriptor.
                written = os.pwritev(self._fd, (line,), -1, _NO_WAIT)
            except OSError as error:
                self._is_gone = error.errno not in _NOT_AT_ONCE
                # If the pipe is full, do not wait for the thread, because the reader has stopped reading.
                self._is_late = error.errno == errno.EAGAIN
                return
            except NotImplementedError:
                return  # The C library has no `pwritev2`.
            if written == len(line):
                self._lines.popleft()
            else:
                self._lines[0] = line[written:]

    def _work(self) -> None:
        """Write all queued lines. Called in the console's thread, where writes may block."""
        # Block all signals in this thread, because other threads handle them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            with self._lock:
                if not self._lines or self._is_gone:
                    self._is_writing = self._is_late = False
                    self._writing.release()
                    break
            self._write(self._lines[0])
            self._lines.popleft()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _write(self, line: bytes) -> None:
        while line and not self._is_gone:
            line = line[self._written(line) :]

    def _written(self, line: bytes) -> int:
        try:
            return os.write(self._fd, line)
        except BlockingIOError:
            # Wait for the reader, because another process has made the shared descriptor non-blocking.
            poll = select.poll()
            poll.register(self._fd, select.POLLOUT)
            poll.poll()
        except OSError:
            # Drop all lines, because stderr is closed or broken and the error cannot be reported anywhere
            # else.
            self._is_gone = True
        return 0


def _whole(text: bytes, limit: int) -> bytes:
    """Truncate UTF-8 text to at most ``limit`` bytes without cutting a character in half."""
    return text if len(text) <= limit else text[:limit].decode("utf-8", "ignore").encode()


def _encode(text: str) -> bytes:
    """Encode text as UTF-8. Escape lone surrogates, because a program that reads the lines may fail on
    invalid UTF-8.
    """
    return visible(text).encode("utf-8", "backslashreplace")
