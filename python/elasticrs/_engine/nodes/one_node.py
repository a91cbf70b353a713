"""Rendezvous of a single-node job. It never waits for other nodes, and every attempt gets a new store."""

from __future__ import annotations

import os

from elasticrs._engine.job.ranks import NodeShare, assign
from elasticrs._engine.workers.plan import Plan
from elasticrs._engine.workers.ports import StorePort, agent_hosts_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs import _core
    from elasticrs._engine.job.config import JobConfig


def plan_one_node(job: JobConfig, supervisor: _core.Supervisor) -> Plan:
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
