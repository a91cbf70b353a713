"""Chooses the class that decides how an agent reacts to events. Only the chosen class is imported."""

from __future__ import annotations

from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs._engine.job.config import JobConfig
    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
    from elasticrs._engine.process.console import Console
    from elasticrs._engine.supervise.decide.decisions import Decisions, Planner


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
        from elasticrs._engine.nodes.one_node import plan_one_node

        planner = planner or partial(plan_one_node, job)
        if job.replaces_workers:
            from elasticrs._engine.supervise.decide.member_workers import MemberWorkers

            return MemberWorkers(job, planner)
        from elasticrs._engine.supervise.decide.decisions import OneNode

        return OneNode(job, planner)
    if job.replaces_workers:
        from elasticrs._engine.supervise.decide.member_nodes import MemberNodes

        return MemberNodes(job, rendezvous, console)
    from elasticrs._engine.supervise.decide.several_nodes import SeveralNodes

    return SeveralNodes(job, rendezvous, console)
