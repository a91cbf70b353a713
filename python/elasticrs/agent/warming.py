"""What the agent says of a nursery that imports before it forks workers."""

from __future__ import annotations

import os

from elasticrs import texts
from elasticrs.warm import report, sources
from elasticrs.warm.report import Report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticrs._core import Warmed
    from elasticrs.warm.sources import Sources


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

    def ended(self, event: Warmed, limit: float) -> None:
        """The nursery is ready, or has ended before it was.

        Args:
            event: which of them.
            limit: seconds that it had.
        """
        self.is_warm = event.is_ready
        told = os.pread(self.report, os.fstat(self.report).st_size - self._read, self._read)
        self._read += len(told)
        self.found = found = report.read(told)
        for one in found.left_out:
            self._say(f"warm: {one.name} was left out: {one.why}")
            self._say_all(one.traceback)
        if found.ready is not None:
            self._sources = sources.remember(found.ready.files, found.ready.prefixes, found.imported)
        self.why_cold = None if event.is_ready else _why_cold(found, event, limit)
        if self.why_cold is not None:
            self._say(f"warm: workers start cold: {self.why_cold}")
            if found.failed is not None:
                self._say_all(found.failed[1])

    def is_outdated(self) -> bool:
        """True if a file has changed that the nursery has imported: there must be another nursery then."""
        changed = None if self._sources is None else self._sources.changed()
        if changed is not None:
            self._sources = None
            self._say(f"warm: {changed} has changed: importing again")
        return changed is not None

    def _say_all(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._say(f"  {line}")

    def close(self) -> None:
        """Release the file. Idempotent."""
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
