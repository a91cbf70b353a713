"""Prints the last lines of a job's log files, and the lines that are added to them."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from elasticrs._engine.cli.control_client import Problem
from elasticrs._engine.process.console import visible
from elasticrs._engine.supervise.run.orders import FAILED, USAGE

if TYPE_CHECKING:
    from typing import Any

    from elasticrs._engine.cli.control_client import Agent

_BLOCK = 1 << 18
"""Bytes that are read of a file at once. Its last lines are searched only in the last so many bytes."""

_LONGEST = 1 << 20
"""Longest line in bytes. The rest of a longer one counts as the next line."""

_ASK = 1.0
"""Seconds between two looks whether the workers have been restarted. They write other files then."""


class LogFile:
    """A file that is read from its last ``count`` lines on, or from its start if ``count`` is ``None``."""

    def __init__(self, path: str, prefix: bytes, count: int | None) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._prefix, self._count, self._rest = prefix, count, b""
        start = 0 if count is None else max(0, os.fstat(self._fd).st_size - _BLOCK)
        os.lseek(self._fd, start, os.SEEK_SET)
        self._is_cut = start > 0

    def new_lines(self) -> list[bytes]:
        """Return the lines that were completed since the last call. Read at most :data:`_BLOCK` bytes."""
        *lines, self._rest = (self._rest + os.read(self._fd, _BLOCK)).split(b"\n")
        if len(self._rest) > _LONGEST:
            lines, self._rest = [*lines, self._rest], b""
        if self._count is not None:
            # If the file is longer than a block, reading has begun inside a line, so skip the first line.
            whole = lines[1:] if self._is_cut else lines
            lines, self._count = whole[max(0, len(whole) - self._count) :], None
        return [self._prefix + line for line in lines]

    def close(self) -> None:
        os.close(self._fd)


class LogLines:
    """The log files of an agent's workers since their last start (attempt). With ``events``, the job's event
    log instead. ``rank``: only the files of this rank. ``count``: number of last lines to begin with, for
    each file. Raises :class:`.Problem` if there are no such files.
    """

    def __init__(
        self, agent: Agent, status: dict[str, Any], *, rank: int | None, events: bool, count: int
    ) -> None:
        self._agent, self._rank = agent, rank
        self._files: list[LogFile] = []
        self._attempt: str | None = None
        self._asked = time.monotonic()
        if events:
            if status["event_log"] is None:
                raise Problem(FAILED, "no event log: start the job with --event-log-handler file:PATH")
            self._files = [LogFile(status["event_log"], b"", max(0, count))]
            return
        if rank is not None and rank not in [worker["rank"] for worker in status["workers"]]:
            raise Problem(USAGE, f"rank {rank} does not run on this node")
        self._open(status, max(0, count))
        if not self._files:
            raise Problem(FAILED, "no log files: start the job with --redirects 3 or --tee 3")

    def _open(self, status: dict[str, Any], count: int | None) -> None:
        self._attempt = status["attempt"]
        folder = os.path.join(status["log_folder"] or "", f"attempt_{self._attempt}")
        for worker in status["workers"]:
            if self._rank not in (None, worker["rank"]):
                continue
            prefix = f"[{worker['rank']}] ".encode() if self._rank is None else b""
            for name in ("stdout.log", "stderr.log"):
                with suppress(FileNotFoundError):
                    path = os.path.join(folder, str(worker["local_rank"]), name)
                    self._files.append(LogFile(path, prefix, count))

    def new_lines(self) -> list[bytes]:
        """Return the lines that have been completed since the last call."""
        return [line for file in self._files for line in file.new_lines()]

    def print_new(self) -> bool:
        """Print the lines that have been completed since the last call. Return false if there are none."""
        lines = self.new_lines()
        if sys.stdout.isatty():
            lines = [visible(line.decode(errors="replace").rpartition("\r")[2]).encode() for line in lines]
        sys.stdout.buffer.write(b"".join(line + b"\n" for line in lines))
        sys.stdout.buffer.flush()
        return bool(lines)

    def follow_attempts(self) -> None:
        """If the workers have been restarted, go on with the log files of the new attempt."""
        if self._attempt is None or time.monotonic() - self._asked < _ASK:
            return
        self._asked = time.monotonic()
        try:
            status = self._agent.asked_again()
        except Problem:
            return  # The agent is ending, or it is stuck. Go on with the files that are open.
        if status["attempt"] != self._attempt:
            while self.print_new():
                continue
            self.close()
            self._open(status, None)

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files = []
