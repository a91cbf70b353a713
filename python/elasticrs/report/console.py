"""The agent's console, which writes lines to stderr without ever blocking.

A console whose reader has stopped (a stopped terminal, a full pipe) must not delay a restart. The file
descriptor cannot be made non-blocking, because the workers share it. Instead, each line is queued until the
descriptor accepts it without blocking.
"""

from __future__ import annotations

import os
import select
import sys
import time

from elasticrs.report.phrases import NAME, visible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# Number of bytes that a pipe accepts without blocking after POLLOUT. The kernel writes up to this many bytes
# atomically.
_PIPE_BUF = 4096
_KEPT = 1000


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
        seconds, rest = divmod(time_ns, 1_000_000_000)
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
        parts.append(f"{clock}.{rest // 1_000_000:03d}Z")
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
    """Adds a prefix to lines, queues them, and writes them to a file descriptor without blocking.

    Args:
        fd: file descriptor to write to.
        log_prefix: see :func:`has_time`.
        is_one_of_several: true if the agents of several nodes may share a console. In this case, the prefix
            contains the name of the node and the pid of the agent.

    Attributes:
        group_rank: group rank of the node, which is part of the prefix; ``None`` while the node has none.
    """

    __slots__ = ("_fd", "_has_time", "_is_gone", "_lines", "_node", "_poll", "group_rank")

    def __init__(
        self, fd: int = 2, log_prefix: str | None = None, *, is_one_of_several: bool = False
    ) -> None:
        self._fd = fd
        self._has_time = has_time(log_prefix, fd)
        self._node = f"{os.uname().nodename}:{os.getpid()}" if is_one_of_several else ""
        self.group_rank: int | None = None
        self._lines: list[bytes] = []
        self._is_gone = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def waiting(self) -> int:
        """Number of queued lines that have not been written yet."""
        return 0 if self._is_gone else len(self._lines)

    def prefixed(self, text: str) -> str:
        """Prepend the console prefix to a text, with the current time if lines show a time."""
        return prefix(time.time_ns() if self._has_time else None, self._node, self.group_rank) + text

    def say(self, text: str) -> None:
        """Queue one line with the prefix. Truncate the line if it is too long for a single atomic write to a
        pipe.
        """
        line = _encode(visible(self.prefixed(" ".join(text.splitlines()))))
        if len(self._lines) < _KEPT:
            self._lines.append(line[: _PIPE_BUF - 1] + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write as many queued lines as possible without blocking."""
        while self._lines and not self._is_gone:
            ready = self._poll.poll(0)
            if not ready:
                return
            if not ready[0][1] & select.POLLOUT:
                self._is_gone = True
                return
            self._write(self._lines.pop(0))

    def write(
        self,
        text: str,
        patience: float,
        wake_fd: int | None = None,
        is_enough: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Write the queued lines, followed by a text of any length. Wait until everything is written.

        Args:
            text: text to write. Control characters in it are made visible.
            patience: maximum number of seconds to wait while the reader does not read.
            wake_fd: file descriptor that can interrupt the wait when it is readable.
            is_enough: called when ``wake_fd`` is readable; returns true to interrupt the wait.

        Returns:
            False if the wait was interrupted or timed out before everything was written.
        """
        data = _encode(visible(text))
        self._lines += [data[start : start + _PIPE_BUF] for start in range(0, len(data), _PIPE_BUF)]
        self.flush()
        waiting = select.poll()
        waiting.register(self._fd, select.POLLOUT)
        if wake_fd is not None:
            waiting.register(wake_fd, select.POLLIN)
        while self._lines and not self._is_gone:
            ready = [fd for fd, _ in waiting.poll(patience * 1000)]
            if not ready or (wake_fd in ready and is_enough()):
                return False
            self.flush()
        return True

    def _write(self, line: bytes) -> None:
        try:
            os.write(self._fd, line)
        except OSError:
            # Drop all lines, because stderr is closed or broken and the error cannot be reported anywhere
            # else.
            self._is_gone = True


def _encode(text: str) -> bytes:
    """Encode text with the file system encoding, so that file names stay unchanged. Characters that it cannot
    encode are escaped.
    """
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        return text.encode(sys.getfilesystemencoding(), "backslashreplace")
