"""What the program `workers/kept_training.py` has logged: its attempts, its steps, its end."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from helpers.forker import WORKERS
from helpers.launcher import Launched
from helpers.procs import HANG

PROGRAM = WORKERS / "kept_training.py"

OPTIONS = ("--standalone", "--warm", "torch._dynamo", "--max-restarts", "99")
"""Options of a launcher for this program. The first optimizer of a process imports ``torch._dynamo``."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PET_MAX_SAME_FAILURES": "0"}


class Logged(NamedTuple):
    """A line of a rank's log."""

    event: str
    rank: int
    attempt: int
    step: int
    at_ns: int
    pid: int
    text: str


class KeptTraining:
    """A training and its logs.

    Args:
        folder: folder of the logs.
        ranks: number of ranks.
    """

    def __init__(self, folder: Path, ranks: int = 2) -> None:
        self.folder, self.ranks = folder, ranks
        folder.mkdir(exist_ok=True)

    def logged(self, event: str | None = None, **fields: Any) -> list[Logged]:
        """Return the lines of all ranks in the order of their times."""
        lines = sorted(self._lines(), key=lambda each: each.at_ns)
        return [
            each
            for each in lines
            if event in (None, each.event)
            and all(getattr(each, name) == value for name, value in fields.items())
        ]

    def _lines(self) -> Iterator[Logged]:
        for rank in range(self.ranks):
            path = self.folder / f"rank{rank}.log"
            complete = path.read_text().split("\n")[:-1] if path.exists() else ()
            for line in complete:
                event, attempt, step, at_ns, pid, text = line.split(" ", 5)
                yield Logged(event, rank, int(attempt), int(step), int(at_ns), int(pid), text)

    def wait_for(self, launched: Launched, event: str, **fields: Any) -> Logged:
        """Wait until a rank has logged this, and return the line.

        Raises:
            AssertionError: the launcher has exited, or there is no such line in time.
        """
        # All modules of torch may have to be read from the disk first.
        deadline = time.monotonic() + 3 * HANG
        while time.monotonic() < deadline:
            if found := self.logged(event, **fields):
                return found[0]
            assert not launched.has_exited, launched.stderr
            launched.read_for(0.01)
        raise AssertionError(f"no {event} {fields}\n{launched.stderr}")

    def ends(self) -> dict[int, str]:
        """Return the digest of each rank's state at the end of the training."""
        return {each.rank: each.text for each in self.logged("done")}

    def lost(self) -> list[int]:
        """Return how many steps each restart has cost, in the order of the restarts."""
        return [*self.lost_by_attempt().values()]

    def lost_by_attempt(self) -> dict[int, int]:
        """Return how many steps each restart has cost, by the number of the attempt that it began. An attempt
        in which not all ranks have got as far as their first step counts with the next one.
        """
        costs, furthest = {}, 0
        for attempt in range(max((each.attempt for each in self.logged()), default=0) + 1):
            starts = {each.step for each in self.logged("restored", attempt=attempt)}
            if attempt and len(self.logged("restored", attempt=attempt)) == self.ranks:
                assert len(starts) == 1, f"the ranks of attempt {attempt} go on from {starts}"
                start = starts.pop()
                costs[attempt], furthest = max(0, furthest - start), start
            furthest = max([furthest, *(each.step for each in self.logged("ended", attempt=attempt))])
        return costs
