"""What the agent says of a nursery that imports before it forks workers."""

from __future__ import annotations

import json
import os

from elasticrs import texts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticrs._core import Warmed


class Warming:
    """Reads the nursery's report, and tells what the user has to know of it.

    Args:
        say: shows a line.

    Attributes:
        report: the descriptor into which nurseries write, one after another.
        is_warm: workers that start now are forks of the nursery.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._read = 0
        self.report = os.memfd_create("warm-report", os.MFD_CLOEXEC)
        self.is_warm = False

    def ended(self, event: Warmed, limit: float) -> None:
        """The nursery is ready, or has ended before it was.

        Args:
            event: which of them.
            limit: seconds that it had.
        """
        self.is_warm = event.is_ready
        lines = os.pread(self.report, os.fstat(self.report).st_size - self._read, self._read)
        self._read += len(lines)
        importing, failed = "", None
        for line in lines.splitlines():
            try:
                told = json.loads(line)
            except ValueError:
                continue  # It was killed while it wrote.
            importing = told.get("importing", importing)
            failed = told.get("failed", failed)
            if "left_out" in told:
                self._say(f"warm: {told['left_out']} was left out: {told['why']}")
            if told.get("traceback"):
                self._say(told["traceback"].rstrip())
        if not event.is_ready:
            what = f"the import of {importing}" if importing else "its start"
            if failed is None and event.hung:
                failed = f"{what} did not end within {limit:g} s"
            self._say(f"warm: workers start cold: {failed or f'{what} {texts.how_it_ended(event.exitcode)}'}")

    def close(self) -> None:
        """Release the file. Idempotent."""
        if self.report != -1:
            os.close(self.report)
            self.report = -1
