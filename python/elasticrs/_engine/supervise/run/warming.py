"""Tracks the nursery (the process that imports modules and then forks workers).

If a file of an imported module has changed, the next attempt gets a new nursery.

- **AGAIN-1** If a file has changed before an attempt begins, the workers of the attempt run the new code.
  This covers all changes that :class:`.Sources` can detect.
- **AGAIN-2** A failed import is not repeated. Workers start cold for the rest of the job.
"""

from __future__ import annotations

import os

from elasticrs._engine.job import phrases
from elasticrs._engine.process.background_call import FileAccess
from elasticrs._engine.workers.warm import import_report
from elasticrs._engine.workers.warm.import_report import Report, Sources

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticrs._core import Supervisor, Warmed


_PATIENCE = 0.5
"""Time limit in seconds for checking the modules' files. A network file system may not respond."""

_MOST_TOUCHED = 3
"""Maximum number of consecutive imports during which a file has changed. After that, workers start cold."""


class Warming:
    """Decides whether workers may be forked from the nursery. ``limit`` is the time limit for its imports, in
    seconds. ``report`` is the file descriptor to which the nurseries report.
    """

    def __init__(self, say: Callable[[str], None], limit: float) -> None:
        self._say = say
        self._limit = limit
        self._read = 0
        self.report = os.memfd_create("warm-report", os.MFD_CLOEXEC)
        self.is_warm = False
        self.why_cold: str | None = None
        self.found = Report()
        self._sources: Sources | None = None
        self._never_again: str | None = None
        self._touched = 0
        self._files = FileAccess(self._tell_slow_files, _PATIENCE)

    def ended(self, event: Warmed) -> None:
        """Handle the end of a nursery's imports, or its exit."""
        told = os.pread(self.report, os.fstat(self.report).st_size - self._read, self._read)
        self._read += len(told)
        self.found = found = import_report.read(told)
        for one in found.left_out:
            self._say(f"warm: {one.name} was left out: {one.why}")
            self._say_all(one.traceback)
        self.is_warm, self._sources, self.why_cold = event.is_ready, None, None
        if not event.is_ready:
            self.start_cold(_why_cold(found, event, self._limit))
            if found.failed is not None:
                self._say_all(found.failed[1])
        elif found.ready is not None:
            ready, imported = found.ready, found.imported
            self._sources = self._files.run(lambda: Sources(ready.stamps, ready.prefixes, imported), None)
            self._limit_touched(import_report.touched(ready.stamps))

    def _limit_touched(self, touched: Sequence[str]) -> None:
        self._touched = self._touched + 1 if touched else 0
        if self._touched >= _MOST_TOUCHED:
            self._never_again = f"{touched[0]} has changed during each of the last {_MOST_TOUCHED} imports"
            self._say(f"warm: workers start cold from the next restart on: {self._never_again}")

    def start_cold(self, why: str) -> None:
        """Tell the user that the workers of this attempt start without preloaded modules."""
        self.is_warm, self.why_cold = False, why
        self._say(f"warm: workers start cold: {why}")

    def may_fork(self, supervisor: Supervisor) -> bool:
        """Return true if the next workers may be forked. If files have changed, renew the nursery."""
        if self._never_again is not None:
            self.is_warm, self.why_cold = False, self._never_again
            return False
        if self._sources is None:
            return True  # Assume no changes, because changes cannot be detected without modification times.
        changed = self._files.run(self._sources.changes, None)
        path = next(iter(changed or ()), None)
        self.is_warm, self.why_cold = path is None, None
        if path is None:
            return True
        if not supervisor.renew_nursery():
            self.start_cold(f"{path} has changed since it was imported")
            return False
        self._sources = None
        self._say(f"warm: {path} has changed: the modules are imported again before the workers start")
        return True

    def _tell_slow_files(self) -> None:
        self._say(
            f"warm: the files of imported modules could not be checked within {_PATIENCE:g} s; "
            "edits may go undetected"
        )

    def _say_all(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._say(f"  {line}")

    def close(self) -> None:
        if self.report != -1:
            os.close(self.report)
            self.report = -1


def _why_cold(found: Report, event: Warmed, limit: float) -> str:
    if found.failed is not None:
        return found.failed[0]
    what = f"the import of {found.importing}" if found.importing else "its start"
    if event.hung:
        return f"{what} did not end within {limit:g} s"
    return f"{what} {phrases.how_it_ended(event.exitcode)}"
