"""Which worker of ``elasticrs.train`` is slower than the others of its node. Pure, but for :class:`Pace`.

All workers of a data-parallel job make as many steps in a second: they wait for the slowest one. So steps
tell nothing of who that is; the rates of ``WorkerStats`` do, where they count a worker's own work alone.

- **PACE-1** nothing is said of a worker before it was slow at every look for :data:`SPAN`, and then once,
  until it has been as fast as the others again.
- **PACE-2** without two rates there is no slowest one.
"""

from __future__ import annotations

import time
from statistics import median

from elasticrs import texts
from elasticrs._value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elasticrs.node_page import AgentPage, Standing

THRESHOLD = 0.8
"""A worker is slow if its rate is less than this part of the median of its node: as for
``CoordinatorP2P.is_worker_straggler``. The median, since one fast worker makes nobody slow.
"""

SPAN = 60.0
"""Seconds for which it has to be: rates of single steps go up and down."""

INTERVAL = 5.0
"""Seconds between two looks."""


class Watch(Value):
    """What is known of those that were slow at the last look.

    Args:
        since: when each was first seen so, in seconds, by pid.
        told: those that the user was told of.
    """

    since: Mapping[int, float]
    told: frozenset[int]


FIRST = Watch({}, frozenset())


def slowest(standings: Sequence[Standing]) -> tuple[Standing, float] | None:
    """Return the worker with the lowest rate, and the median of all rates; ``None``: see PACE-2."""
    rated = [each for each in standings if each.rate is not None]
    if len(rated) < 2:
        return None
    rates = [each.rate for each in rated if each.rate is not None]
    return rated[rates.index(min(rates))], median(rates)


def step(watch: Watch, standings: Sequence[Standing], now: float) -> tuple[Watch, list[Standing]]:
    """Return what is known after a look, and the workers that the user is told of now.

    Args:
        watch: what was known before.
        standings: of the workers of this node.
        now: seconds.
    """
    found = slowest(standings)
    limit = 0.0 if found is None else THRESHOLD * found[1]
    slow = [each for each in standings if found is not None and each.rate is not None and each.rate < limit]
    since = {each.pid: watch.since.get(each.pid, now) for each in slow}
    told = watch.told & since.keys()
    news = [each for each in slow if each.pid not in told and now - since[each.pid] >= SPAN]
    return Watch(since, told | {each.pid for each in news}), news


class Pace:
    """Looks at the page of a node now and then.

    Args:
        page: that the workers write into.
        say: tells the user a line.
        tell: is given what the workers say of themselves, at each look.
    """

    def __init__(
        self, page: AgentPage, say: Callable[[str], None], tell: Callable[[Sequence[Standing]], object]
    ) -> None:
        self._page, self._say, self._tell = page, say, tell
        self._watch = FIRST
        self._next = 0.0

    def look(self) -> None:
        """Look, if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL
        standings = self._page.standings()
        if standings:
            self._tell(standings)
        self._watch, news = step(self._watch, standings, now)
        found = slowest(standings)
        for each in news:
            if found is not None and each.rate is not None:
                self._say(texts.slow_worker(each.rank, each.pid, each.rate, found[1], SPAN))
