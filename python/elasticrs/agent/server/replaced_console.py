"""Prints the workers' output in a program that has replaced ``sys.stdout`` or ``sys.stderr``.

The core writes to file descriptors. But in a notebook, or with ``contextlib.redirect_stdout``, the lines must
be written to a Python object, as torch's agent does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elasticrs._engine.supervise.observe.observer import Observer
from elasticrs._engine.workers.logs import line_prefixes
from elasticrs.multiprocessing.tail_log import TailLog

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO

    from elasticrs._engine.supervise.attempts.attempt import Attempt, JobResult


class ReplacedConsole(Observer):
    """Observer for a program that has replaced ``sys.stdout`` or ``sys.stderr``. Copies the workers' console
    output to the program's own streams while the workers run.
    """

    def __init__(self, streams: Mapping[int, TextIO], role: str, template: str | None) -> None:
        self._streams = streams
        self._role = role
        self._template = template
        self._tails: list[TailLog] = []

    def prepared(self, attempt: Attempt) -> None:
        """Start copying from the log files of the attempt."""
        self._stop()
        paths = attempt.paths
        prefixes = line_prefixes(self._template, attempt.plan.ranks)
        for fd, stream in self._streams.items():
            tees = paths.tee_stdouts if fd == 1 else paths.tee_stderrs
            files = {rank: path for rank, path in tees.items() if path != os.devnull}
            self._tails.append(TailLog(self._role, files, stream, prefixes).start())

    def over(self, attempt: Attempt, outcome: str) -> None:  # noqa: ARG002 -- the base class's signature
        """Copy the remaining lines and stop, because the exited workers write no further lines."""
        self._stop()

    def ended(self, result: JobResult, error: BaseException | None) -> None:  # noqa: ARG002 -- as above
        """Copy the remaining lines at the end of the job."""
        self._stop()

    def _stop(self) -> None:
        while self._tails:
            self._tails.pop().stop()
