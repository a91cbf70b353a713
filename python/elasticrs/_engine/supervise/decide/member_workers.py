"""Agent of a single-node job with ``--on-failure replace``. It hosts the store of its workers' rendezvous."""

from __future__ import annotations

import os
from functools import partial
from urllib.parse import quote, urlencode

from elasticrs._engine.job.config import LOOPBACK
from elasticrs._engine.nodes.describe import describe
from elasticrs._engine.nodes.hosting import SystemResolver, decide_hosting
from elasticrs._engine.nodes.protocol.records import workers_job, workers_scope
from elasticrs._engine.nodes.rendezvous_store import CannotHost, RendezvousStore
from elasticrs._engine.nodes.transport.addresses import shown_endpoint
from elasticrs._engine.nodes.transport.coordination import scoped_token
from elasticrs._engine.supervise import state_machine as machine
from elasticrs._engine.supervise.decide.decisions import OneNode
from elasticrs._engine.workers.plan import NCCL_ENDS_PROCESSES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticrs import _core
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
    from elasticrs._engine.process.background_call import BackgroundCall

_FOR_WORKERS = frozenset(
    {
        # Settings for the connection to the store.
        *("connect_timeout", "store_lost_timeout", "store_grace"),
        *("keep_alive_interval", "keep_alive_max_attempt"),
        # Settings for the connection to etcd. Workers get the path of the password file, never the password.
        *("protocol", "ca_cert", "cacert", "ssl_cert", "cert", "ssl_cert_key", "key"),
        *("user", "password_file", "etcd_prefix", "lease_ttl", "read_timeout"),
        # Settings of the rendezvous: time limits, ports of the workers' store, and the order of ranks.
        *("join_timeout", "last_call_timeout", "restart_call_timeout", "worker_port_range", "order_hint"),
    }
)
"""Settings in ``--rdzv-conf`` that also apply to the rendezvous of the workers."""


class MemberWorkers(OneNode):
    """Makes the decisions of a single node's agent whose workers form a rendezvous."""

    def __init__(self, job: JobSpec) -> None:
        super().__init__(job)
        self._rendezvous = among_workers(_alone(job), job)
        self._store: RendezvousStore | None = None
        self._variables: dict[str, str] = {}
        self._members: dict[int, str] = {}
        self._trouble: str | None = None

    def next_plan(self, supervisor: _core.Supervisor) -> machine.Event | None:
        if self._store is None:
            # Resolve the host names on another thread, because name servers may be slow.
            self._ask(partial(decide_hosting, self._rendezvous, SystemResolver()), self._host)
            return None
        if self._trouble is not None:
            return machine.RendezvousFailed(self._trouble)
        event = super().next_plan(supervisor)
        if self.plan is not None:
            self.plan.variables, self.plan.members = self._variables, self._members
        return event

    def _host(self, names: BackgroundCall) -> list[machine.Action]:
        self._store = store = RendezvousStore(self._rendezvous, self._supervisor, found=names.take())
        try:
            store.host_if_possible()
        except CannotHost as error:
            self._trouble = str(error)
        self._variables = variables_of_members(self._rendezvous, store, 0)
        event = self.next_plan(self._supervisor)
        return [] if event is None else self.step(event)

    def close(self) -> None:
        super().close()
        if self._store is not None:
            self._store.close(stays=False)


def _alone(job: JobSpec) -> Rendezvous:
    two, _ = describe("c10d", f"{LOOPBACK}:0", job.run_id, (2, 2), {"token": os.urandom(16).hex()}, {})
    if two is None:
        raise RuntimeError("two nodes have a rendezvous")
    return two.replaced(min_nodes=1, max_nodes=1)


def among_workers(nodes: Rendezvous, job: JobSpec) -> Rendezvous:
    """Return the workers' rendezvous: a copy of the nodes' rendezvous, with workers as its members."""
    return nodes.replaced(min_nodes=nodes.min_nodes * job.nproc, max_nodes=nodes.max_nodes * job.nproc)


def variables_of_members(rendezvous: Rendezvous, store: RendezvousStore, number: int) -> dict[str, str]:
    """Return the environment variables for the workers' rendezvous. ``number``: see :func:`.workers_job`."""
    etcd = rendezvous.etcd
    settings = for_workers(rendezvous.config)
    if etcd is None:
        scheme, endpoint = "elasticrs", shown_endpoint(*store.address)
    else:
        scheme, endpoint = "etcd", rendezvous.endpoint
        # The user may have given the protocol only in the endpoint, so pass it on as a setting.
        settings["protocol"] = "https" if etcd.is_tls else "http"
        if "timeout" in rendezvous.config:
            settings.setdefault("join_timeout", str(rendezvous.config["timeout"]))
    limits = {"min_workers": str(rendezvous.min_nodes), "max_workers": str(rendezvous.max_nodes)}
    job = quote(rendezvous.run_id, safe="")
    variables = {
        "ELASTICRS_TRAIN": f"{scheme}://{endpoint}/{job}?{urlencode({**settings, **limits})}",
        "ELASTICRS_TRAIN_JOB": workers_job(rendezvous.run_id, store.job, number),
        # Tell NCCL's watchdog not to kill a worker that can continue after its collective was aborted.
        NCCL_ENDS_PROCESSES: os.environ.get(NCCL_ENDS_PROCESSES, "0"),
    }
    if (token := _workers_token(rendezvous)) is not None:
        variables["ELASTICRS_TRAIN_TOKEN"] = token
    return variables


def for_workers(config: Mapping[str, object]) -> dict[str, str]:
    """Return the settings of ``--rdzv-conf`` that workers get, including those to log in to etcd."""
    return {key: str(value) for key, value in config.items() if key in _FOR_WORKERS and value is not None}


def _workers_token(rendezvous: Rendezvous) -> str | None:
    """Return a token for the workers' keys only, not the job's own token; ``None`` with etcd or no token."""
    token = rendezvous.settings.token
    if token is None or rendezvous.etcd is not None:
        return None
    return scoped_token(token, workers_scope(rendezvous.run_id))
