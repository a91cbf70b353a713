"""Tracks the nurseries (the processes that import modules and then fork workers).

The workers of an attempt are forked only if no file of an imported module has changed. When files change
during an attempt, a second nursery imports the modules again in the background, and replaces the first
nursery at the next restart.

- **AGAIN-1** Workers are never forked from a nursery that imported a file before its last change, as far as
  :mod:`elasticrs.workers.warm.sources` can detect the change. They start cold instead.
- **AGAIN-2** Workers never wait for imports that are repeated because a file has changed.
- **AGAIN-3** A failed import is not repeated. Workers start cold for the rest of the job.
"""

from __future__ import annotations

import os
import time

from elasticrs.host.background_call import BackgroundCall
from elasticrs.report import phrases
from elasticrs.workers.warm import import_report, sources
from elasticrs.workers.warm.import_report import Report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeVar

    from elasticrs._core import Supervisor, Warmed
    from elasticrs.workers.warm.sources import Sources, Stamp

    _T = TypeVar("_T")

_PATIENCE = 0.5
"""Time limit in seconds for checking the files before workers start, because a network file system may not
respond.
"""

CHECK_INTERVAL = 5.0
"""Seconds between two checks of the imported files while an attempt runs."""

_SHARE = 50
"""Minimum pause after a check of the imported files, as a multiple of the duration of the check."""

_SLOWER = 10
"""Factor by which the time limit is extended for imports in the background, because they get little CPU time.
"""

_MOST_TOUCHED = 3
"""Maximum number of consecutive imports during which a file has changed. After that, workers start cold."""


class Warming:
    """Reads the nurseries' reports, prints messages for the user, and decides whether workers may be forked.

    Args:
        say: prints a line for the user.
        limit: time limit for the imports of the first nursery, in seconds.

    Attributes:
        report: descriptor of the file into which all nurseries write their reports, in order.
        is_warm: true if workers that start now are forked from a nursery.
        why_cold: reason why workers start cold; ``None`` if they start warm.
        found: latest report of a nursery.
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
        self._beside: Sources | None = None
        self._is_importing = self._is_over = self._is_stuck = False
        self._touched = 0
        self._settling = sources.Settling()
        self._due = 0.0
        self._looking: BackgroundCall | None = None
        self._checking: BackgroundCall | None = None

    def ended(self, event: Warmed) -> None:
        """Handle the event that reports the end of a nursery's imports or the exit of a nursery.

        Args:
            event: result of the imports.
        """
        told = os.pread(self.report, os.fstat(self.report).st_size - self._read, self._read)
        self._read += len(told)
        self.found = found = import_report.read(told)
        for one in found.left_out:
            self._say(f"warm: {one.name} was left out: {one.why}")
            self._say_all(one.traceback)
        known = None
        if event.is_ready and found.ready is not None:
            ready, imported = found.ready, found.imported
            known = self._look(lambda: sources.remember(ready.stamps, ready.prefixes, imported))
        self._start_checks()
        if event.is_beside:
            was_importing, self._is_importing, self._beside = self._is_importing, False, known
            if not was_importing:
                how = phrases.how_it_ended(event.exitcode)
                self._go_cold(f"the process that had imported the changed modules {how}")
            elif not event.is_ready:
                why = _why_cold(found, event, _SLOWER * self._limit)
                self._go_cold(f"the changed modules could not be imported again: {why}")
            elif found.ready is not None:
                self._say(f"warm: imported again in {found.ready.seconds:.1f} s: the next restart is warm")
        else:
            self._sources, self.is_warm = known, event.is_ready
            self.why_cold = None if event.is_ready else _why_cold(found, event, self._limit)
            if self.why_cold is not None:
                self._say(f"warm: workers start cold: {self.why_cold}")
        if not event.is_ready and found.failed is not None:
            self._say_all(found.failed[1])
        if event.is_ready and found.ready is not None:
            self._limit_touched(sources.touched(found.ready.stamps))

    def _limit_touched(self, touched: Sequence[str]) -> None:
        self._touched = self._touched + 1 if touched else 0
        if self._touched >= _MOST_TOUCHED:
            self._go_cold(f"{touched[0]} has changed during each of the last {_MOST_TOUCHED} imports")

    def _go_cold(self, why: str) -> None:
        """Start workers cold (without preloaded modules) for the rest of the job."""
        self._is_over, self.is_warm, self.why_cold = True, False, why
        self._say(f"warm: workers start cold from now on: {why}")

    def start_cold(self, why: str) -> None:
        """Report that the workers of this attempt start cold because they could not be forked."""
        self.is_warm, self.why_cold = False, why
        self._say(f"warm: workers start cold: {why}")

    def may_fork(self, supervisor: Supervisor) -> bool:
        """Return true if the workers of a new attempt may be forked from a process with preloaded modules. If
        the modules' files have changed, first try to switch to a second process, which has imported the new
        files.

        Args:
            supervisor: supervisor of the nurseries. It may not have a group of workers.
        """
        if self._is_over:
            return False
        if self._sources is None:
            return True  # Assume no changes, because changes cannot be detected without modification times.
        changed = self._look(self._sources.changes)
        beside = self._beside
        if changed and beside is not None and self._look(beside.changes) == {} and supervisor.take_over():
            self._sources, self._beside, changed = beside, None, None
            self._start_checks()
        path = next(iter(changed or ()), None)
        self.is_warm = path is None
        self.why_cold = path and f"{path} has changed since it was imported"
        if path is not None:
            self._say(
                f"warm: {path} has changed since it was imported: workers start cold with the new files"
            )
        return self.is_warm

    def look_again(self, supervisor: Supervisor) -> float | None:
        """Check the imported files for changes if a check is due. Once the files have stopped changing,
        import them again in the background.

        Args:
            supervisor: supervisor of the nurseries.

        Returns:
            Seconds until this method must be called again; ``None`` if there is nothing to check.
        """
        newest = self._sources if self._beside is None else self._beside
        if newest is None or self._is_importing or self._is_over:
            return None
        left = self._due - time.monotonic()
        if left > 0:
            return left
        pause = CHECK_INTERVAL
        if self._checking is None:
            self._checking = BackgroundCall(lambda: _check(newest))
        elif self._checking.wait(0):
            checked, changes, seconds = self._checking.take()
            self._checking.close()
            self._checking = None
            pause = max(pause, _SHARE * seconds)
            if checked is newest and self._settling.have_settled(changes):
                self._import_again(supervisor, next(iter(changes)))
                return None
            self._checking = BackgroundCall(lambda: _check(newest))
        self._due = time.monotonic() + pause
        return pause

    def _import_again(self, supervisor: Supervisor, path: str) -> None:
        self._beside, self._is_importing = None, True
        self._say(
            f"warm: {path} has changed: importing again in the background; a restart before then starts cold"
        )
        supervisor.import_beside(_SLOWER * self._limit)

    def _start_checks(self) -> None:
        self._settling = sources.Settling()
        self._due = time.monotonic() + CHECK_INTERVAL

    def _look(self, look: Callable[[], _T]) -> _T | None:
        """Return the result of a file check, or ``None`` if this check or an earlier one takes too long."""
        if any(not self._has_ended(earlier) for earlier in (self._looking, self._checking)):
            return None
        if self._looking is not None:
            self._looking.close()
        self._looking = asked = BackgroundCall(look)
        if not self._has_ended(asked):
            return None
        self._looking = None
        asked.close()
        found: _T = asked.take()
        return found

    def _has_ended(self, asked: BackgroundCall | None) -> bool:
        """Wait until a file check has finished. Return false if the wait times out. Print a message, unless
        the previous wait also timed out.
        """
        if asked is None:
            return True
        was_stuck, self._is_stuck = self._is_stuck, not asked.wait(0 if self._is_stuck else _PATIENCE)
        if self._is_stuck and not was_stuck:
            self._say(
                f"warm: the files of imported modules could not be checked within {_PATIENCE:g} s; "
                "edits may go undetected"
            )
        return not self._is_stuck

    def _say_all(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._say(f"  {line}")

    def close(self) -> None:
        """Close the report file, and stop waiting for file checks. Idempotent."""
        for asked in (self._looking, self._checking):
            if asked is not None:
                asked.close()
        self._looking = self._checking = None
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


def _check(known: Sources) -> tuple[Sources, Mapping[str, Stamp], float]:
    """Check the imported files in ``known``. Return ``known``, the changed files, and the duration of the
    check in seconds.
    """
    begun = time.monotonic()
    return known, known.changes(), time.monotonic() - begun
