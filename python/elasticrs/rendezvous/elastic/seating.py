"""Assigns group ranks, which stay the same for nodes that stay.

The first round is sorted by order hint, then by the natural order of names, then by agent. Later, whoever was
there keeps its place, newcomers in that same order fill the holes, holes that stay open are closed, and the
rest is appended: so a replacement changes nobody else's rank.
"""

from __future__ import annotations

from itertools import groupby

from elasticrs.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Candidate(Value):
    """An agent that can take part.

    Args:
        agent: which.
        joined: create revision of its registration.
        hint: its place before the name; ``None`` sorts last.
        name: of the node.
    """

    agent: str
    joined: int
    hint: int | None
    name: str


def natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """A key that sorts runs of digits as numbers: ``node2`` before ``node10``."""
    return tuple(
        (False, int(run), run) if is_number else (True, 0, run)
        for is_number, run in ((flag, "".join(each)) for flag, each in groupby(name, str.isdecimal))
    )


def seat(previous: Sequence[str], candidates: Iterable[Candidate], size: int) -> list[str]:
    """Return the agents of the next round, by group rank.

    Args:
        previous: the agents of the last round, by group rank.
        candidates: one for each agent that could take part.
        size: how many may; who stays goes before newcomers, and those are taken in the order they came.
    """
    offered = {each.agent: each for each in candidates}
    stay = [agent for agent in previous if agent in offered][:size]
    staying, before = set(stay), set(previous)
    newcomers = sorted(
        (each for agent, each in offered.items() if agent not in before),
        key=lambda each: (each.joined, each.agent),
    )[: size - len(stay)]
    newcomers.sort(key=lambda each: (each.hint is None, each.hint or 0, natural(each.name), each.agent))
    fill = iter([each.agent for each in newcomers])
    seats = [agent if agent in staying else next(fill, None) for agent in previous]
    return [agent for agent in seats if agent is not None] + list(fill)
