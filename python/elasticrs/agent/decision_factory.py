"""Chooses the class that decides how an agent reacts to events. Only the chosen class is imported."""

from __future__ import annotations

from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.agent.decisions import Decisions, Planner
    from elasticrs.job.config import JobConfig
    from elasticrs.rendezvous.elastic.rendezvous import Rendezvous
    from elasticrs.report.console import Console


def make_decisions(
    job: JobConfig,
    rendezvous: Rendezvous | None,
    console: Console,
    planner: Planner | None = None,
) -> Decisions:
    """Create the object that decides how an agent reacts to events.

    Args:
        job: configuration of the job.
        rendezvous: rendezvous in which the agent meets the agents of other nodes; ``None`` for a job on one
            node.
        console: prints lines for the user.
        planner: assigns the ranks of a job on one node; a default planner if ``None``.
    """
    if rendezvous is None:
        from elasticrs.rendezvous.one_node import plan_one_node

        planner = planner or partial(plan_one_node, job)
        if job.replaces_workers:
            from elasticrs.agent.member_workers import MemberWorkers

            return MemberWorkers(job, planner)
        from elasticrs.agent.decisions import OneNode

        return OneNode(job, planner)
    if job.replaces_workers:
        from elasticrs.agent.member_nodes import MemberNodes

        return MemberNodes(job, rendezvous, console)
    from elasticrs.agent.several_nodes import SeveralNodes

    return SeveralNodes(job, rendezvous, console)
