"""The agent's console, which writes lines to stderr without waiting for a reader that has stopped.

The descriptor cannot be made non-blocking, because the workers share it. A poll does not help, because a
worker may fill the pipe before the write. So each line is written with ``RWF_NOWAIT``. If that would block,
a thread writes the line. The thread exists only while lines are queued.
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

from elasticrs._engine.job.phrases import folded, prefix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

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
"""Seconds to wait until a line is written, which keeps it in order with the output of the workers."""
END_PATIENCE = 1.0
"""Maximum number of seconds to wait for the last lines at the end of a job."""

_LOOK = 0.02
"""Seconds between two polls of the file descriptor that can interrupt a wait for the reader."""


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_CONTROLS |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
# Python decodes bytes that are not valid UTF-8, such as a Latin-1 file name, to lone surrogates.
_CONTROLS |= {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(128, 256)}


def visible(text: str) -> str:
    """Escape control characters, except newlines and tabs, and bytes that are not valid UTF-8. Names and
    workers' output may clear the screen, set the terminal's title, or change the text's direction.
    """
    return text.translate(_CONTROLS)


DESCRIPTORS = {"stdout": 1, "stderr": 2}


def descriptors(std: str) -> set[int]:
    """Return a stream's descriptors: that of C code and child processes, and that of Python's object."""
    usual = DESCRIPTORS[std]
    try:
        return {usual, int(getattr(sys, std).fileno())}
    except (AttributeError, OSError, ValueError):
        return {usual}


def wants_colour(fd: int, environ: Mapping[str, str]) -> bool:
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb" and os.isatty(fd)


def has_time(log_prefix: str | None, fd: int) -> bool:
    """Return true if the launcher's lines have a time. ``log_prefix`` defaults to ``PET_LOG_PREFIX``."""
    if log_prefix is None:
        log_prefix = os.environ.get("PET_LOG_PREFIX")
    return log_prefix == "time" or (log_prefix != "none" and not os.isatty(fd))


def _width(fd: int) -> int:
    """Return the width of a terminal. 0 if it is unknown, for example because the terminal is gone."""
    try:
        return os.get_terminal_size(fd).columns
    except OSError:
        return 0


class Console:
    """Writes the agent's lines with a prefix, which names node and pid if the job has several agents."""

    __slots__ = (
        *("_fd", "_has_time", "_is_gone", "_is_late", "_is_terminal", "_is_writing", "_lines", "_lock"),
        *("_node", "_writing", "group_rank"),
    )

    def __init__(
        self, fd: int = 2, log_prefix: str | None = None, *, is_one_of_several: bool = False
    ) -> None:
        self._fd = fd
        self._has_time = has_time(log_prefix, fd)
        self._is_terminal = os.isatty(fd)
        self._node = f"{os.uname().nodename}:{os.getpid()}" if is_one_of_several else ""
        self.group_rank: int | None = None
        self._lines: deque[bytes] = deque()
        self._is_gone = self._is_late = self._is_writing = False
        self._lock = _thread.allocate_lock()
        # Lock that is held while the thread exists.
        self._writing = _thread.allocate_lock()

    @property
    def waiting(self) -> int:
        return 0 if self._is_gone else len(self._lines)

    def prefixed(self, text: str) -> str:
        return prefix(time.time_ns() if self._has_time else None, self._node, self.group_rank) + text

    def say(self, text: str) -> None:
        """Write one line, truncated to what a pipe accepts at once. Queue it if the reader does not read.

        Fold it on a terminal, but not in files and pipes, because programs search these line by line.
        """
        text = " ".join(text[:_PIPE_BUF].splitlines())
        if self._is_terminal:
            line = _encode("\n".join(folded(text, self.prefixed(""), _width(self._fd))))
        else:
            line = _encode(self.prefixed(text))
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
        """Write the queued lines, and then a text of any length. Return false if a part of it is still
        queued.

        If the reader does not read, wait at most ``patience`` seconds. Stop earlier if ``wake_fd`` is
        readable and ``is_enough`` returns true. If the console shows colours, ``paint`` adds them to the
        text.
        """
        shown = visible(text)
        if wants_colour(self._fd, os.environ):
            shown = paint(shown)
        data = shown.encode("utf-8", "backslashreplace")
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
            # The process has reached its limit on threads.
            self._work()

    def _write_at_once(self) -> None:
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
            try:
                line = line[os.write(self._fd, line) :]
            except BlockingIOError:  # noqa: PERF203 -- usually a single iteration
                # Wait for the reader, because another process has made the shared descriptor non-blocking.
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError:
                self._is_gone = True  # The error cannot be reported, because stderr is closed or broken.


def _whole(text: bytes, limit: int) -> bytes:
    """Truncate UTF-8 text to at most ``limit`` bytes without cutting a character in half."""
    return text if len(text) <= limit else text[:limit].decode("utf-8", "ignore").encode()


def _encode(text: str) -> bytes:
    """Encode text as UTF-8. Escape lone surrogates, because programs that read the output may reject them."""
    return visible(text).encode("utf-8", "backslashreplace")
