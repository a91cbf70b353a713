"""Choose the rendezvous back end for a command line by the same rules as torch. The back end determines the
participating nodes and the address of the workers' store.

::

    --standalone, or one node without an endpoint and a port    no rendezvous
    static                                                      the user assigns the ranks of the nodes
    c10d, elasticrs, etcd                                       the rendezvous assigns the ranks
    anything else, or c10d in a file                            a rendezvous handler that is polled
"""

from __future__ import annotations

from elasticrs._engine import public
from elasticrs._engine.job import config
from elasticrs._engine.job.config import HandlerSettings, UsageError
from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from elasticrs._engine.job.options import Namespace
    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous


class Meeting(Value):
    """Rendezvous of a job's nodes, together with the address of the workers' store.

    Args:
        run_id: name of the job.
        master_addr: address at which rank 0 hosts the workers' store.
        master_port: port of that store; a new port for every attempt if ``None``.
        rendezvous: rendezvous with the other nodes; ``None`` if there are no other nodes.
        handler: settings of a polled handler that replaces elasticrs's own rendezvous; ``None`` if there is
            none.
    """

    run_id: str
    master_addr: str
    master_port: int | None = None
    rendezvous: Rendezvous | None = None
    handler: HandlerSettings | None = None

    @property
    def lets_workers_meet(self) -> bool:
        """True if the workers can form a rendezvous of their own in the store of the nodes' rendezvous."""
        return self.handler is None and (self.rendezvous is None or not self.rendezvous.is_static)


def meeting_of(args: Namespace, environ: Mapping[str, str], grace: float, notices: list[str]) -> Meeting:
    """Choose the back end for a command line and check its settings. Add messages for the user to
    ``notices``.

    Raises:
        UsageError: the command line has a mistake. The message is one line for the user.
    """
    if is_alone(args):
        return _alone(args, environ, grace, notices)
    from elasticrs._engine.nodes.describe import BACKENDS, C10D, ETCD, STATIC, is_in_file

    makers: dict[str, Callable[[Namespace, Mapping[str, str], float, list[str]], Meeting]]
    makers = {STATIC: _static, C10D: _elastic, ETCD: _elastic}
    backend = BACKENDS.get(args.rdzv_backend, "")
    if args.rdzv_backend == C10D and is_in_file(args.rdzv_conf):
        backend = ""
    return makers.get(backend, _polled)(args, environ, grace, notices)


def is_alone(args: Any) -> bool:
    """Return true if the job runs on a single node without a rendezvous, either because of ``--standalone``
    or by default.

    Raises:
        UsageError: ``--standalone`` is combined with several nodes.
    """
    low, high = args.nnodes
    if args.standalone and low > 1:
        nodes = str(low) if low == high else f"{low}:{high}"
        raise UsageError(f"--standalone is for one node, but --nnodes is {nodes}")
    is_plain = args.rdzv_backend == "static" and high == 1 and args.master_port is None
    return bool(args.standalone) or (is_plain and not args.rdzv_endpoint.strip())


def _alone(args: Namespace, environ: Mapping[str, str], grace: float, notices: list[str]) -> Meeting:
    if args.rdzv_conf or args.node_rank != 0:
        # Check the settings even though there is no rendezvous. As in torch, the given back end and endpoint
        # are ignored.
        _describe("static", args, environ, grace, notices)
    return Meeting(config.random_run_id(), args.local_addr or "localhost")


def _static(args: Namespace, environ: Mapping[str, str], grace: float, notices: list[str]) -> Meeting:
    from elasticrs._engine.nodes.transport.addresses import parse_endpoint

    rendezvous = _describe("static", args, environ, grace, notices)
    endpoint = _static_endpoint(args)
    host, port = parse_endpoint("--rdzv-endpoint", endpoint)
    if port is None:
        raise UsageError(
            f"--rdzv-endpoint: got {endpoint!r}, expected HOST:PORT with the static rendezvous, "
            "the same on all nodes"
        )
    return Meeting(args.rdzv_id, host, port or None, rendezvous)


def _elastic(args: Namespace, environ: Mapping[str, str], grace: float, notices: list[str]) -> Meeting:
    rendezvous = _describe(args.rdzv_backend, args, environ, grace, notices)
    if args.master_port is not None:
        notices.append("--master-port has no effect: only the static rendezvous uses it")
    # The endpoint's port is taken by the nodes' rendezvous, so the workers' store gets a new port for every
    # attempt.
    return Meeting(args.rdzv_id, args.local_addr or "localhost", None, rendezvous)


def _polled(args: Namespace, environ: Mapping[str, str], _grace: float, notices: list[str]) -> Meeting:
    from elasticrs._engine.nodes.describe import COMMAND_LINE
    from elasticrs._engine.nodes.transport.settings import exit_barrier_timeout_of

    # Programs and packages register their own back ends there.
    public("rendezvous.registry.find_backend")(args.rdzv_backend, COMMAND_LINE)
    for option, is_given in (
        ("--master-port", args.master_port is not None),
        ("--node-rank", args.node_rank != 0),
        ("--drain", args.drain is not None),
    ):
        if is_given:
            notices.append(f"{option} has no effect: this rendezvous backend does not support it")
    barrier = args.exit_barrier_timeout
    if barrier is None:
        barrier = exit_barrier_timeout_of(args.rdzv_conf, environ, "--rdzv-conf")
    handler = HandlerSettings.taken_from(args, exit_barrier_timeout=barrier)
    return Meeting(args.rdzv_id, args.local_addr or "localhost", handler=handler)


def _describe(
    backend: str, args: Namespace, environ: Mapping[str, str], grace: float, notices: list[str]
) -> Rendezvous | None:
    from elasticrs._engine.nodes.describe import describe

    rendezvous, more = describe(
        backend,
        _static_endpoint(args) if backend == "static" else args.rdzv_endpoint.strip(),
        args.rdzv_id,
        (1, 1) if args.standalone else args.nnodes,
        {**args.rdzv_conf, **({} if args.drain is None else {"drain": args.drain})},
        environ,
        node_rank=0 if args.standalone else args.node_rank,
        local_addr=args.local_addr,
        grace=grace,
        exit_barrier_timeout=args.exit_barrier_timeout,
    )
    notices += more
    return rendezvous


def _static_endpoint(args: Namespace) -> str:
    from elasticrs._engine.nodes.transport.addresses import shown_endpoint

    if endpoint := args.rdzv_endpoint.strip():
        return str(endpoint)
    host = args.master_addr.strip().strip("[]")
    port = config.DEFAULT_MASTER_PORT if args.master_port is None else args.master_port
    return shown_endpoint(host, port)
