"""The rendezvous of a job on one node: nobody to wait for, a fresh port for every attempt."""

from __future__ import annotations

from elasticrs.agent.attempt import Plan
from elasticrs.ports import ReservedPort
from elasticrs.ranks import NodeShare, assign

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.config import JobConfig


class OneNodePlanner:
    """Plans attempts for one node.

    Args:
        job: the job; with a ``master_port`` of its own that one is used as it is.
    """

    __slots__ = ("_job",)

    def __init__(self, job: JobConfig) -> None:
        self._job = job

    def next(self) -> Plan:
        """Ranks, address and port of the next attempt.

        Raises:
            OSError: no port or descriptor is free.
        """
        ranks = assign([NodeShare(self._job.role, self._job.nproc)], 0)
        if self._job.master_port is not None:
            return Plan(ranks, self._job.master_addr, self._job.master_port)
        reserved = ReservedPort()
        return Plan(ranks, self._job.master_addr, reserved.number, reserved)

    def close(self) -> None:
        """No further attempt follows: nobody has to be told."""
