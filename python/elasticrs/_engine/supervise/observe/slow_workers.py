"""Finds the slowest worker on a node, among the workers that use ``elasticrs.train``.

The workers of a data-parallel job wait for the slowest one, so all make the same number of steps. Only rates
of each worker's own work (``WorkerStats``) identify the slowest worker.

- **SLOW-1** A worker is reported once it has been slow at every check for :data:`SPAN` seconds. It is
  reported again only if it has been as fast as the other workers in the meantime.
- **SLOW-2** If fewer than two workers report a rate, there is no slowest worker.
"""

from __future__ import annotations

import time
from statistics import median

from elasticrs._engine.job import phrases
from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elasticrs._engine.workers.node_page import AgentPage, Standing

THRESHOLD = 0.8
"""A worker is slow below this fraction of the node's median rate (``CoordinatorP2P.is_worker_straggler``).
Because of the median, one fast worker does not make the others count as slow.
"""

SPAN = 60.0
"""Seconds for which a worker must be slow, because the rates of single steps fluctuate."""

INTERVAL = 5.0
"""Seconds between two checks."""


class SlowWorkers(Value):
    """State between two checks: the time in seconds at which each worker was first seen slow, by pid, and the
    pids of the workers that were reported.
    """

    since: Mapping[int, float]
    told: frozenset[int]


NO_SLOW_WORKERS = SlowWorkers({}, frozenset())


def slowest(standings: Sequence[Standing]) -> tuple[Standing, float] | None:
    """Return the worker with the lowest rate, and the median of all rates (SLOW-2)."""
    rated = [each for each in standings if each.rate is not None]
    if len(rated) < 2:
        return None
    rates = [each.rate for each in rated if each.rate is not None]
    return rated[rates.index(min(rates))], median(rates)


def check(
    before: SlowWorkers, standings: Sequence[Standing], now: float
) -> tuple[SlowWorkers, list[Standing]]:
    """Return the updated state, and the slow workers to report."""
    found = slowest(standings)
    limit = 0.0 if found is None else THRESHOLD * found[1]
    slow = [each for each in standings if found is not None and each.rate is not None and each.rate < limit]
    since = {each.pid: before.since.get(each.pid, now) for each in slow}
    told = before.told & since.keys()
    news = [each for each in slow if each.pid not in told and now - since[each.pid] >= SPAN]
    return SlowWorkers(since, told | {each.pid for each in news}), news


class SlowWorkerCheck:
    def __init__(
        self, page: AgentPage, say: Callable[[str], None], tell: Callable[[Sequence[Standing]], object]
    ) -> None:
        self._page, self._say, self._tell = page, say, tell
        self._slow = NO_SLOW_WORKERS
        self._next = 0.0

    def look(self) -> float:
        """Check the workers' rates if a check is due. Return the number of seconds until the next check."""
        now = time.monotonic()
        if now < self._next:
            return self._next - now
        self._next = now + INTERVAL
        standings = self._page.standings()
        if standings:
            self._tell(standings)
        self._slow, news = check(self._slow, standings, now)
        found = slowest(standings)
        for each in news:
            if found is not None and each.rate is not None:
                self._say(phrases.slow_worker(each.rank, each.pid, each.rate, found[1], SPAN))
        return INTERVAL
