"""Assign group ranks. Nodes that stay in the job keep their ranks if possible.

In the first round, nodes are sorted by order hint, then by name in natural order, then by agent. In later
rounds, a node that was in the previous round keeps its place. New nodes fill the gaps in the same sort order.
Gaps that remain are closed, and the remaining new nodes are appended. As a result, a replacement node does
not change the ranks of other nodes.
"""

from __future__ import annotations

from itertools import groupby

from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Candidate(Value):
    """Agent that can take part in the next round.

    Args:
        agent: name of the agent.
        joined: create revision of the agent's registration.
        hint: number that determines the order, with precedence over the name; ``None`` sorts last.
        name: name of the node.
    """

    agent: str
    joined: int
    hint: int | None
    name: str


def natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Return a natural sort key that compares runs of digits as numbers, so that ``node2`` sorts before
    ``node10``.
    """
    return tuple(
        (False, int(run), run) if is_number else (True, 0, run)
        for is_number, run in ((flag, "".join(each)) for flag, each in groupby(name, str.isdecimal))
    )


def seat(previous: Sequence[str], candidates: Iterable[Candidate], size: int) -> list[str]:
    """Return the agents of the next round, ordered by group rank.

    Args:
        previous: agents of the last round, by group rank.
        candidates: agents that can take part, each once.
        size: maximum number of agents. Agents of the last round take precedence over new ones, and new agents
            are selected in the order in which they joined.
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
