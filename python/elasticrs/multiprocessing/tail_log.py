"""Copy lines of growing files, with a prefix, to any object with a ``write`` method.

Unlike in torch, one thread copies all files, only whole lines are copied, the last line always ends with a
newline, and stopping does not wait for another interval. The core prints the output of an agent's workers.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING, BinaryIO, TextIO

from elasticrs._engine.job.value import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

__all__ = ["TailLog", "tail_logfile"]

logger = logging.getLogger(__name__)

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 20


class _File(Record):
    header: str
    path: str
    dst: TextIO
    line_filter: Callable[[str], bool] | None
    file: BinaryIO | None = None
    rest: bytes = b""

    def advance(self) -> bool:
        if self.file is None:
            try:
                self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115 -- see `close`
            except FileNotFoundError:
                return False
        piece = self.file.read(_CHUNK)
        if not piece:
            return False
        *lines, self.rest = (self.rest + piece).split(b"\n")
        for line in lines:
            self._show(line)
        if len(self.rest) > _LONGEST_LINE:
            self._show(self.rest)
            self.rest = b""
        return True

    def finish(self) -> None:
        if self.rest:
            self._show(self.rest)
        self.close()

    def close(self) -> None:
        self.rest = b""
        if self.file is not None:
            self.file.close()
            self.file = None

    def _show(self, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace") + "\n"
        if self.line_filter is None or self.line_filter(text):
            self.dst.write(self.header + text)


def tail_logfile(
    header: str,
    file: str,
    dst: TextIO,
    finished: Event,
    interval_sec: float,
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """Copy the lines of a file until ``finished`` is set. Raise ``OSError`` if the file cannot be read.

    Args:
        header: prefix of every line.
        file: path of the file, which may not exist yet.
        dst: object to which the lines are written.
        finished: event that is set when the producer has written everything.
        interval_sec: seconds between two reads.
        log_line_filter: function that returns true for lines to copy; ``None`` for all (in torch: no) lines.
    """

    def failed(_file: _File, error: Exception) -> None:
        raise error

    _follow([_File(header, file, dst, log_line_filter)], finished, interval_sec, failed)


def _follow(
    files: list[_File], finished: Event, interval_sec: float, failed: Callable[[_File, Exception], None]
) -> None:
    is_finished = False
    while not is_finished:
        # Check `finished` before reading, so that the last read includes all that was written before.
        is_finished = finished.is_set()
        until = math.inf if is_finished else time.monotonic() + interval_sec
        # Read one chunk of each file in turn, so that a lot of new data does not delay the others.
        while _each(files, _File.advance, failed) and time.monotonic() < until:
            continue
        if not is_finished:
            finished.wait(interval_sec)
    _each(files, _File.finish, failed)


def _each(
    files: list[_File], act: Callable[[_File], bool | None], failed: Callable[[_File, Exception], None]
) -> bool:
    was_news = False
    for file in list(files):
        try:
            was_news = bool(act(file)) or was_news
        except Exception as error:  # noqa: PERF203 -- the other files must still be copied
            files.remove(file)
            file.close()
            failed(file, error)
    return was_news


class TailLog:
    """Copies growing files to ``dst`` (``None``: nowhere), such as ``sys.stdout``, in a thread.

    Args:
        name: name in the default prefix of a line: ``[name0]:`` for the file with index 0.
        log_files: paths by index. The files may not exist yet.
        log_line_prefixes: custom prefixes by index.
        interval_sec: seconds between two reads.
        log_line_filter: function that returns true for lines to copy.
    """

    def __init__(
        self,
        name: str,
        log_files: Mapping[int, str],
        dst: TextIO | None,
        log_line_prefixes: Mapping[int, str] | None = None,
        interval_sec: float = 0.1,
        log_line_filter: Callable[[str], bool] = (lambda _: True),
    ) -> None:
        self._name = name
        self._log_files = dict(log_files)
        self._dst = dst
        self._prefixes = log_line_prefixes or {}
        self._interval_sec = interval_sec
        self._filter = log_line_filter
        self._finished = Event()
        self._future: Future[None] | None = None
        self._stopped = False
        # The executor creates its thread for the first task.
        self._threadpool = (
            ThreadPoolExecutor(1, thread_name_prefix=f"{type(self).__qualname__}_{name}")
            if self._log_files
            else None
        )

    def take_files(self) -> dict[int, str]:
        """Return the log files to a caller that copies them itself. Call this before :meth:`start`."""
        taken, self._log_files = self._log_files, {}
        return taken

    def start(self) -> TailLog:
        """Start to copy the files in a thread."""
        if self._threadpool is not None and self._dst is not None and self._log_files:
            self._future = self._threadpool.submit(self._copy, self._dst)
        return self

    def stop(self) -> None:
        """Copy the remaining lines and stop the thread. Log an error for each file that cannot be read."""
        self._finished.set()
        if self._future is not None:
            self._future.result()
        if self._threadpool is not None:
            self._threadpool.shutdown(wait=True)
        self._stopped = True

    def stopped(self) -> bool:
        """Return true if :meth:`stop` has returned."""
        return self._stopped

    def _copy(self, dst: TextIO) -> None:
        files = [
            _File(self._prefixes.get(index, f"[{self._name}{index}]:"), path, dst, self._filter)
            for index, path in self._log_files.items()
        ]
        _follow(files, self._finished, self._interval_sec, _log_failure)


def _log_failure(file: _File, error: Exception) -> None:
    kind = type(error).__name__
    logger.error("%s the log %s cannot be shown: %s", file.header, file.path, kind, exc_info=error)


def replaced_streams() -> dict[int, TextIO]:
    """Return the standard streams that the program has replaced, by file descriptor (1 or 2)."""
    found = {1: sys.stdout, 2: sys.stderr}
    return {fd: stream for fd, stream in found.items() if stream is not None and _descriptor_of(stream) != fd}


def _descriptor_of(stream: TextIO) -> int:
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return -1
