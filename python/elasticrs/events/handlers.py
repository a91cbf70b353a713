"""Destinations of events: :mod:`logging` handlers by name, in a table that users may change."""

from __future__ import annotations

import logging
import os
import signal
import stat
import threading
from importlib.metadata import entry_points
from queue import Queue
from typing import TYPE_CHECKING, TextIO

from elasticrs._engine.process.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EVENT_HANDLERS", "UnknownDestinationError", "get_logging_handler"]

EVENT_HANDLERS = "elasticrs.event_handlers"
"""Entry point group in which packages provide event handlers."""

if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    # `StreamHandler` is generic only in the type stubs.
    _StreamHandler = logging.StreamHandler

_FILE = "file:"
_SLOW = "slow"

_PATIENCE = 2.0
"""Seconds to wait at the end for queued lines. A console's reader may be stopped, or a file system hang."""

_WAITING = 10_000
"""Maximum number of lines that wait for a console. Further lines are dropped."""

_log = logging.getLogger("elasticrs.events")


class UnknownDestinationError(KeyError):
    """Raised if no event handler has this name. It is a ``KeyError``, as in torch."""

    def __str__(self) -> str:
        return str(self.args[0])


class ConsoleHandler(_StreamHandler):
    """Writes lines without a prefix to standard error. Does not block if the console accepts no output."""

    def __init__(self) -> None:
        super().__init__()
        self._console: Console | None = None
        self._owner = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line now, or queue it until the console accepts it."""
        try:
            descriptor = self.stream.fileno()
        except (OSError, ValueError):
            # The program has replaced `sys.stderr` with an object that has no descriptor.
            super().emit(record)
            return
        if self._console is None or self._owner != os.getpid():
            self._console, self._owner = Console(descriptor), os.getpid()
        if self._console.waiting < _WAITING:
            self._console.write(self.format(record) + self.terminator, 0.0)

    def flush(self) -> None:
        """Wait until the console has accepted all lines, or until a time limit expires."""
        if self._console is not None and self._owner == os.getpid():
            self._console.write("", _PATIENCE)
        elif self._console is None:
            super().flush()


class LineFileHandler(logging.Handler):
    """Appends events to a JSON Lines file, each with a single ``write``. Failures are flushed to disk.

    Args:
        path: path of the file, created with mode 0644. ``OSError`` is raised if it cannot be opened, with
            ``ENXIO`` for a FIFO without a reader.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        # Open without blocking, because a FIFO may have no reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
        self._fd = os.open(path, flags, 0o644)
        self._complaints: set[str] = set()
        self._behind: LineQueue | None = None
        self._agents = 0

    @property
    def _queue(self) -> LineQueue | None:
        """Queue of lines for the background thread; ``None`` if this process has none, as after a fork."""
        return self._behind if self._behind is not None and self._behind.owner == os.getpid() else None

    def write_behind(self) -> None:
        """Write in a background thread from now on. Each call must be undone by :meth:`write_through`."""
        self._agents += 1
        self._behind = self._queue or LineQueue(self._write)

    def write_through(self) -> None:
        """Wait until all lines are written, and undo one call of :meth:`write_behind`. If none is left, end
        the background thread.
        """
        self._agents -= 1
        left, queue = self._wait(), self._queue
        if left:
            self._complain(_SLOW, f"{left} were not written within {_PATIENCE:g} s")
        elif queue is not None and self._agents == 0:
            self._behind = None
            queue.end()

    def _wait(self) -> int:
        """Wait a limited time until all lines are written. Return the number of lines that were not."""
        return 0 if self._queue is None else self._queue.wait(0.0 if _SLOW in self._complaints else _PATIENCE)

    def emit(self, record: logging.LogRecord) -> None:
        """Append an event to the file. Log each kind of write error once instead of raising it."""
        line, is_failure = (self.format(record) + "\n").encode(), getattr(record, "is_failure", False)
        if self._queue is None:
            self._write(line, is_failure)
        elif not self._queue.put(line, is_failure):
            self._complain("full", "writing hangs, so events are dropped until it continues")

    def _write(self, line: bytes, is_failure: bool) -> None:
        try:
            while line:
                line = line[os.write(self._fd, line) :]
            if is_failure and stat.S_ISREG(os.fstat(self._fd).st_mode):
                os.fsync(self._fd)
        except OSError as error:
            self._complain("error", error.strerror or str(error))

    def _complain(self, kind: str, what: str) -> None:
        if kind not in self._complaints:
            self._complaints.add(kind)
            _log.warning("events cannot be written to %s: %s", self._path, what)

    def flush(self) -> None:
        self._wait()

    def close(self) -> None:
        """Close the file, unless writing to it hangs. Idempotent."""
        if self._queue is not None and self._queue.wait(0.0):
            return
        descriptor, self._fd = self._fd, -1
        if descriptor != -1:
            os.close(descriptor)
        super().close()


_log_handlers: dict[str, logging.Handler] = {
    "console": ConsoleHandler(),
    "dynamic_rendezvous": logging.NullHandler(),
    "null": logging.NullHandler(),
}


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """Return the handler of a destination, creating it on first use.

    Args:
        destination: a name in ``_log_handlers``, ``file:PATH``, or an entry point of a package.

    Raises:
        UnknownDestinationError: the destination does not exist.
        OSError: the file cannot be opened.
        TypeError: an entry point returns an object that is not a handler.
    """
    handler = _log_handlers.get(destination)
    if handler is None:
        handler = _log_handlers[destination] = _make(destination)
    return handler


def _make(destination: str) -> logging.Handler:
    if destination.startswith(_FILE):
        return LineFileHandler(destination[len(_FILE) :])
    offered = entry_points(group=EVENT_HANDLERS)
    for entry in offered:
        if entry.name == destination:
            handler = entry.load()()
            if not isinstance(handler, logging.Handler):
                raise TypeError(
                    f"{EVENT_HANDLERS}: {destination!r} gives {handler!r}, expected a logging.Handler"
                )
            return handler
    names = ", ".join([*sorted(set(_log_handlers) | {entry.name for entry in offered}), "file:PATH"])
    raise UnknownDestinationError(f"got {destination!r}, expected one of {names}")


MOST = 10_000
"""Maximum number of lines that wait to be written. Further lines are dropped."""


class LineQueue:
    """Queue of lines. Its thread writes them and flushes failures to disk, so that no other thread blocks."""

    def __init__(self, write: Callable[[bytes, bool], None]) -> None:
        self._write = write
        self.owner = os.getpid()
        self._lines: Queue[tuple[bytes, bool] | None] = Queue()
        self._thread: threading.Thread | None = None

    def put(self, line: bytes, is_failure: bool) -> bool:
        """Add a line to the queue. Return false if it was dropped because too many lines are waiting."""
        if self._lines.unfinished_tasks >= MOST:
            return False
        self._lines.put((line, is_failure))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="elasticrs-events", daemon=True)
            self._start(self._thread)
        return True

    @staticmethod
    def _start(thread: threading.Thread) -> None:
        # Block all signals in the new thread, so that the kernel delivers them to the main thread.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait(self, seconds: float) -> int:
        """Wait until all lines are written, for at most ``seconds``. Return the number of unwritten lines."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, seconds)
            return self._lines.unfinished_tasks

    def end(self) -> None:
        """End the thread. The caller must first wait until all lines are written."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(*line)
            self._lines.task_done()
