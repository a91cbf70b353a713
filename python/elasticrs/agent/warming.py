"""What the agent says of a nursery that imports before it forks workers."""

from __future__ import annotations

import os

from elasticrs import texts
from elasticrs.asked import Asked
from elasticrs.warm import report, sources
from elasticrs.warm.report import Report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from elasticrs._core import Warmed
    from elasticrs.warm.sources import Sources

    _T = TypeVar("_T")

_PATIENCE = 0.5
"""Seconds that a look at the files of modules holds up a start: a network file system may be gone."""


class Warming:
    """Reads the nursery's report, and tells what the user has to know of it.

    Args:
        say: shows a line.

    Attributes:
        report: the descriptor into which nurseries write, one after another.
        is_warm: workers that start now are forks of the nursery.
        why_cold: why they are not; ``None`` if they are.
        found: what the last nursery has told.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._read = 0
        self.report = os.memfd_create("warm-report", os.MFD_CLOEXEC)
        self.is_warm = False
        self.why_cold: str | None = None
        self.found = Report()
        self._sources: Sources | None = None
        self._looking: Asked | None = None

    def ended(self, event: Warmed, limit: float) -> None:
        """Handle the event that the nursery is ready or has exited before that.

        Args:
            event: result of the imports.
            limit: time limit for the imports, in seconds.
        """
        self.is_warm = event.is_ready
        told = os.pread(self.report, os.fstat(self.report).st_size - self._read, self._read)
        self._read += len(told)
        self.found = found = report.read(told)
        for one in found.left_out:
            self._say(f"warm: {one.name} was left out: {one.why}")
            self._say_all(one.traceback)
        self._sources = None
        if event.is_ready and found.ready is not None:
            ready, imported = found.ready, found.imported
            self._sources = self._look(lambda: sources.remember(ready.stamps, ready.prefixes, imported))
        self.why_cold = None if event.is_ready else _why_cold(found, event, limit)
        if self.why_cold is not None:
            self._say(f"warm: workers start cold: {self.why_cold}")
            if found.failed is not None:
                self._say_all(found.failed[1])

    def is_outdated(self) -> bool:
        """True if a file has changed that the nursery has imported: there must be another nursery then.
        False if that cannot be told in time.
        """
        changed = None if self._sources is None else self._look(self._sources.changed)
        if changed is not None:
            self._sources = None
            self._say(f"warm: {changed} has changed: importing again")
        return changed is not None

    def _look(self, look: Callable[[], _T]) -> _T | None:
        """Return what a look at files finds, or ``None`` if it takes too long."""
        if self._looking is not None and not self._looking.wait(0):
            return None
        self._stop_looking()
        self._looking = asked = Asked(look)
        if not asked.wait(_PATIENCE):
            self._say(
                f"warm: the files of imported modules cannot be looked at within {_PATIENCE:g} s: "
                "an edited one goes unnoticed"
            )
            return None
        self._stop_looking()
        found: _T = asked.take()
        return found

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.close()
            self._looking = None

    def _say_all(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._say(f"  {line}")

    def close(self) -> None:
        """Release the file. Idempotent."""
        self._stop_looking()
        if self.report != -1:
            os.close(self.report)
            self.report = -1


def _why_cold(found: Report, event: Warmed, limit: float) -> str:
    if found.failed is not None:
        return found.failed[0]
    what = f"the import of {found.importing}" if found.importing else "its start"
    if event.hung:
        return f"{what} did not end within {limit:g} s"
    return f"{what} {texts.how_it_ended(event.exitcode)}"
