"""The rendezvous of a job on one node: nobody to wait for, a fresh store for every attempt."""

from __future__ import annotations

import os

from elasticrs.job.ranks import NodeShare, assign
from elasticrs.workers.plan import Plan
from elasticrs.workers.ports import StorePort, agent_hosts_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs import _core
    from elasticrs.job.config import JobConfig


class OneNodePlanner:
    """Plans attempts for one node; a ``master_port`` of the job's own is used as it is, and rank 0 hosts the
    store.
    """

    __slots__ = ("_job",)

    def __init__(self, job: JobConfig) -> None:
        self._job = job

    def next(self, supervisor: _core.Supervisor) -> Plan:
        """Return ranks and store of the next attempt; the supervisor serves the store.

        Raises:
            OSError: no port or descriptor is free.
        """
        ranks = assign([NodeShare(self._job.role, self._job.nproc)], 0)
        if self._job.master_port is not None:
            return Plan(ranks, self._job.master_addr, self._job.master_port)
        is_served = agent_hosts_store(os.environ)
        port = StorePort(is_served=is_served)
        port.serve(supervisor)
        return Plan(ranks, self._job.master_addr, port.number, port, use_agent_store=is_served)

    def close(self) -> None:
        """No further attempt follows; there are no other nodes to tell."""
