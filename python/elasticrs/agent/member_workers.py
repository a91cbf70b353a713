"""A node by itself whose workers are members of a rendezvous.

Only with ``--on-failure replace``; see :mod:`elasticrs.train`. The agent keeps its workers, one for each
place, and hosts the store in which they meet. One among several is in :mod:`elasticrs.agent.member_nodes`.
"""

from __future__ import annotations

import os
from functools import partial
from urllib.parse import quote, urlencode

from elasticrs.agent import state as machine
from elasticrs.agent.decisions import OneNode
from elasticrs.asked import Asked
from elasticrs.config import LOOPBACK
from elasticrs.rendezvous.elastic.describe import describe
from elasticrs.rendezvous.elastic.hosting import SystemResolver, look_up
from elasticrs.rendezvous.elastic.meeting_point import CannotHost, MeetingPoint
from elasticrs.rendezvous.endpoint import shown_endpoint
from elasticrs.rendezvous.one_node import OneNodePlanner
from elasticrs.worker_env import NCCL_ENDS_PROCESSES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs import _core
    from elasticrs.agent.decisions import Planner
    from elasticrs.config import JobConfig
    from elasticrs.rendezvous.elastic.settings import Rendezvous

_NOT_FOR_WORKERS = ("token", "token_file", "host", "is_host")


class MemberWorkers(OneNode):
    """Decides for such a node.

    Args:
        job: the job.
        planner: of this node's ranks; one of our own when ``None``.
    """

    def __init__(self, job: JobConfig, planner: Planner | None = None) -> None:
        super().__init__(job, planner or OneNodePlanner(job))
        self._rendezvous = among_workers(_alone(job), job)
        self._supervisor: _core.Supervisor | None = None
        self._names: Asked | None = None
        self._begin: machine.Event | None = None
        self._meeting_point: MeetingPoint | None = None
        self._variables: dict[str, str] = {}
        self._members: dict[int, str] = {}
        self._trouble: str | None = None

    def open(self, supervisor: _core.Supervisor) -> None:
        """See the base class: name servers are asked, which may take long."""
        self._supervisor = supervisor
        self._names = Asked(partial(look_up, self._rendezvous, SystemResolver()))
        supervisor.watch_fd(self._names.fd)

    def step(self, event: machine.Event) -> list[machine.Action]:
        if isinstance(event, machine.Begin) and self._meeting_point is None:
            # What follows comes with the names.
            self._begin = event
            return []
        return super().step(event)

    def fd_ready(self, fd: int) -> list[machine.Action] | None:
        names, supervisor = self._names, self._supervisor
        if names is None or supervisor is None or fd != names.fd:
            return None
        self._names = None
        supervisor.unwatch_fd(fd)
        names.close()
        self._meeting_point = meeting_point = MeetingPoint(self._rendezvous, supervisor, found=names.take())
        try:
            meeting_point.host_if_possible()
        except CannotHost as error:
            self._trouble = str(error)
        self._variables = variables_of_members(self._rendezvous, meeting_point, meeting_point.job)
        begin, self._begin = self._begin, None
        return [] if begin is None else self.step(begin)

    def next_plan(self, supervisor: _core.Supervisor) -> machine.Event:
        if self._trouble is not None:
            return machine.RendezvousFailed(self._trouble)
        event = super().next_plan(supervisor)
        if self.plan is not None:
            self.plan.variables, self.plan.members = self._variables, self._members
        return event

    def close(self) -> None:
        if self._names is not None:
            self._names.close()
        if self._meeting_point is not None:
            self._meeting_point.close(stays=False)


def _alone(job: JobConfig) -> Rendezvous:
    """The rendezvous of workers that meet those of no other node: on a free port, with a token."""
    two, _ = describe("c10d", f"{LOOPBACK}:0", job.run_id, (2, 2), {"token": os.urandom(16).hex()}, {})
    if two is None:
        raise RuntimeError("two nodes have a rendezvous")
    return two.replaced(min_nodes=1, max_nodes=1)


def among_workers(nodes: Rendezvous, job: JobConfig) -> Rendezvous:
    """Return the rendezvous of the workers of some nodes: whoever may come is a worker."""
    return nodes.replaced(min_nodes=nodes.min_nodes * job.nproc, max_nodes=nodes.max_nodes * job.nproc)


def variables_of_members(rendezvous: Rendezvous, meeting_point: MeetingPoint, name: str) -> dict[str, str]:
    """Return what workers need to know to find each other; ``name``: of their job in the store."""
    if rendezvous.etcd is None:
        scheme, endpoint = "elasticrs", shown_endpoint(*meeting_point.address)
    else:
        scheme, endpoint = "etcd", rendezvous.endpoint
    given = {key: str(value) for key, value in rendezvous.config.items() if key not in _NOT_FOR_WORKERS}
    limits = {"min_workers": str(rendezvous.min_nodes), "max_workers": str(rendezvous.max_nodes)}
    job = quote(rendezvous.run_id, safe="")
    variables = {
        "ELASTICRS_TRAIN": f"{scheme}://{endpoint}/{job}?{urlencode({**given, **limits})}",
        "ELASTICRS_TRAIN_JOB": name,
        # Else NCCL's own watchdog ends a worker that has left a collective which was aborted.
        NCCL_ENDS_PROCESSES: os.environ.get(NCCL_ENDS_PROCESSES, "0"),
    }
    if rendezvous.settings.token is not None:
        variables["ELASTICRS_TRAIN_TOKEN"] = rendezvous.settings.token.decode(errors="surrogateescape")
    return variables
