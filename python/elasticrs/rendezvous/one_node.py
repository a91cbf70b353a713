"""The rendezvous of a job on one node: nobody to wait for, a fresh store for every attempt."""

from __future__ import annotations

import os

from elasticrs.plan import Plan
from elasticrs.ports import ReservedPort, agent_hosts_store, worker_store
from elasticrs.ranks import NodeShare, assign

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs import _core
    from elasticrs.config import JobConfig


class OneNodePlanner:
    """Plans attempts for one node.

    Args:
        job: the job; with a ``master_port`` of its own that one is used as it is, and rank 0 hosts the store.
    """

    __slots__ = ("_job",)

    def __init__(self, job: JobConfig) -> None:
        self._job = job

    def next(self, supervisor: _core.Supervisor) -> Plan:
        """Ranks and store of the next attempt.

        Args:
            supervisor: serves the store.

        Raises:
            OSError: no port or descriptor is free.
        """
        ranks = assign([NodeShare(self._job.role, self._job.nproc)], 0)
        if self._job.master_port is not None:
            return Plan(ranks, self._job.master_addr, self._job.master_port)
        if agent_hosts_store(os.environ):
            store = worker_store()
            store.serve(supervisor)
            return Plan(ranks, self._job.master_addr, store.port, store=store, use_agent_store=True)
        reserved = ReservedPort()
        return Plan(ranks, self._job.master_addr, reserved.number, reserved)

    def close(self) -> None:
        """No further attempt follows; there are no other nodes to tell."""
