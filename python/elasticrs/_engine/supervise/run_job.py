"""Runs a job on this node: chooses what makes its decisions, and plans the attempts of a job on one node."""

from __future__ import annotations

import os
from functools import partial

from elasticrs._engine.job.ranks import NodeShare, assign
from elasticrs._engine.workers.plan import Plan
from elasticrs._engine.workers.ports import StorePort, agent_hosts_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs import _core
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
    from elasticrs._engine.process.console import Console
    from elasticrs._engine.supervise.decide.decisions import Decisions, Planner


def make_decisions(
    job: JobSpec,
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


def plan_one_node(job: JobSpec, supervisor: _core.Supervisor) -> Plan:
    """Plan the next attempt of a single-node job: the ranks, and the address of the workers' store.

    If the job sets ``master_port``, rank 0 hosts the store on that port. Otherwise the port is free, and this
    process hosts the store if :func:`.ports.agent_hosts_store` is true. ``supervisor`` reports its messages.

    Raises:
        OSError: no port is free, or file descriptors have run out.
    """
    ranks = assign([NodeShare(job.role, job.nproc)], 0)
    if job.master_port is not None:
        return Plan(ranks, job.master_addr, job.master_port)
    is_served = agent_hosts_store(os.environ)
    port = StorePort(is_served=is_served)
    port.serve(supervisor)
    return Plan(ranks, job.master_addr, port.number, port, use_agent_store=is_served)
