"""Check the user's settings for this node, and convert them to a :class:`.Rendezvous`.

- **NODES-1** A job of one node has no rendezvous if no other node could join: with ``static``, without an
  endpoint, and with ``c10d`` at a loopback address with port 0.
- **NODES-2** Any other job of one node has a rendezvous. A second agent becomes a spare, or is refused if it
  could never replace the first agent.
- **NODES-3** With ``static``, a range of nodes (MIN:MAX) is an error. Torch accepts a range, and silently
  uses MAX.
- **NODES-4** With ``static``, the setting ``store_type=file`` of ``c10d`` has no effect, as in torch.
- **NODES-5** ``--node-rank`` also orders the nodes with ``c10d`` and ``etcd``. Torch ignores it and warns.
- **NODES-6** With ``etcd``, etcd's own permissions decide which nodes may join. The job's token has no
  effect.
"""

from __future__ import annotations

from elasticrs._engine.job.config import DEFAULT_PORT, DEFAULT_SHUTDOWN_TIMEOUT, UsageError
from elasticrs._engine.job.value import Record, Value, fresh
from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
from elasticrs._engine.nodes.transport.addresses import is_loopback_name, parse_endpoint
from elasticrs._engine.nodes.transport.settings import BY_NAME, read_settings, read_value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from elasticrs._engine.nodes.transport.etcd_site import EtcdSite

STATIC = "static"
C10D = "c10d"
ETCD = "etcd"
_ETCD_V2 = "etcd-v2"
BACKENDS = {C10D: C10D, "elasticrs": C10D, STATIC: STATIC, ETCD: ETCD, "etcd-v3": ETCD, _ETCD_V2: ETCD}

_MAX_RUN_ID = 256
_STATIC_JOIN_TIMEOUT = 900.0


class Words(Value):
    """Names of the settings in error messages: command-line options, or parameters of the Python API."""

    backend: str
    endpoint: str
    nodes: str
    node_rank: str
    run_id: str
    settings: str


COMMAND_LINE = Words(
    "--rdzv-backend", "--rdzv-endpoint", "--nnodes", "--node-rank", "--rdzv-id", "--rdzv-conf"
)
PYTHON = Words(
    "rdzv_backend", "rdzv_endpoint", "min_nodes:max_nodes", "rdzv_configs['rank']", "run_id", "rdzv_configs"
)


def is_in_file(config: Mapping[str, object]) -> bool:
    """Return true if the ``c10d`` settings select a file store. The job then has no elastic rendezvous."""
    return str(config.get("store_type", "tcp")).strip().lower() == "file"


def check_backend(backend: str, words: Words = COMMAND_LINE, others: Iterable[str] = ()) -> str:
    """Return the kind of the rendezvous back end with this name. For an unknown name, raise
    :class:`.UsageError` with all valid names: those of the back ends, and ``others``.
    """
    found = BACKENDS.get(backend)
    if found is not None:
        return found
    raise UsageError(f"{words.backend}: got {backend!r}, expected {', '.join((*BACKENDS, *others))}")


def describe(
    backend: str,
    endpoint: str,
    run_id: str,
    nodes: tuple[int, int],
    config: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    node_rank: int | None = None,
    local_addr: str | None = None,
    grace: float = DEFAULT_SHUTDOWN_TIMEOUT,
    exit_barrier_timeout: float | None = None,
    words: Words = COMMAND_LINE,
) -> tuple[Rendezvous | None, list[str]]:
    """Return two values: the description of the nodes' rendezvous (``None`` if a single node needs none), and
    a list of messages to the user. Raise :class:`.UsageError` if the settings are invalid as far as that is
    known without a connection. The caller has already checked ``nodes`` (minimum and maximum number of
    nodes). Workers may take ``grace`` seconds to stop.
    """
    kind = check_backend(backend, words)
    low, high = nodes
    if kind == STATIC:
        node_rank = _static_rank(nodes, node_rank, config.get("rank"), words)
    own = _own_settings(backend, endpoint, config, node_rank, words)
    times = {"grace": grace, "exit_barrier_timeout": exit_barrier_timeout}
    settings, notices = read_settings(
        own.given,
        environ,
        source=words.settings,
        others=own.names,
        **times,  # type: ignore[arg-type]
    )
    notices = [*own.notices, *notices]
    if high == 1 and (kind == STATIC or not endpoint):
        return None, notices
    if not endpoint:
        raise UsageError(
            f"{words.endpoint} is needed for several nodes: {own.expected}, the same on all nodes"
        )
    given_port: int | None
    if own.etcd is None:
        host, given_port = parse_endpoint(words.endpoint, endpoint)
    else:
        host, given_port = own.etcd.endpoints[0]
        if settings.token is not None:
            notices.append("the token has no effect, because etcd's permissions decide which nodes may join")
    port = DEFAULT_PORT if given_port is None else given_port
    if high == 1 and port == 0 and is_loopback_name(host):
        return None, notices
    if kind == STATIC:
        if settings.is_host is not None and settings.is_host != (node_rank == 0):
            raise UsageError(
                f"{words.settings}: is_host: got {int(settings.is_host)} for node rank {node_rank}, "
                "but node rank 0 hosts the static rendezvous: leave it out"
            )
        notices += _check_static(words, endpoint, host, given_port, node_rank)
    if not 0 < len(run_id.encode(errors="surrogateescape")) <= _MAX_RUN_ID:
        raise UsageError(f"{words.run_id}: got {run_id!r}, expected 1 to {_MAX_RUN_ID} bytes")
    rendezvous = Rendezvous(
        kind,
        host,
        port,
        run_id=run_id,
        min_nodes=low,
        max_nodes=high,
        settings=settings,
        node_rank=node_rank if kind == STATIC else None,
        local_addr=local_addr,
        etcd=own.etcd,
        config=config,
    )
    return rendezvous, notices


class _Own(Record):
    """The user's settings. ``given`` has all except those in ``names``, which only this back end accepts."""

    given: dict[str, object]
    notices: list[str] = fresh(factory=list)
    etcd: EtcdSite | None = None
    names: tuple[str, ...] = ()
    expected: str = "HOST[:PORT] of the node that hosts the rendezvous"


def _own_settings(
    backend: str, endpoint: str, config: Mapping[str, object], node_rank: int | None, words: Words
) -> _Own:
    kind = BACKENDS[backend]
    own = _Own(dict(config))
    if kind == ETCD:
        from elasticrs._engine.nodes.transport import etcd_site

        # If there is no endpoint, check the other settings anyway, with torch's default endpoint.
        found = etcd_site.read_site(endpoint or "localhost", config, words.settings, words.endpoint)
        own = _Own(found[1], found[2], found[0], etcd_site.NAMES, etcd_site.EXPECTED)
        if backend == _ETCD_V2:
            own.notices.append(f"{words.backend} {backend}: elasticrs speaks etcd's v3 interface")
    if kind == STATIC:
        own.given["order_hint"] = node_rank
        if is_in_file(own.given):
            del own.given["store_type"]
            own.notices.append(
                f"{words.settings}: store_type=file has no effect here: it is for {words.backend} {C10D}"
            )
        # If ``join_timeout`` is not set, use torch's setting ``timeout``, or else torchrun's default timeout.
        own.given.setdefault("join_timeout", own.given.get("timeout", _STATIC_JOIN_TIMEOUT))
    elif node_rank is not None:
        own.given.setdefault("order_hint", node_rank)
    return own


def _static_rank(nodes: tuple[int, int], node_rank: int | None, configured: object, words: Words) -> int:
    low, high = nodes
    if low != high:
        raise UsageError(
            f"{words.nodes}: got {low}:{high}, expected one number with the static rendezvous, "
            f"whose ranks are given by hand; {words.backend} c10d or etcd takes a range"
        )
    if configured is not None and node_rank is not None and str(configured) != str(node_rank):
        raise UsageError(
            f"{words.settings}: rank: got {configured!r}, but {words.node_rank} is {node_rank}: leave it out"
        )
    rank: int = node_rank or 0
    if node_rank is None and configured is not None:
        rank = read_value(BY_NAME["rank"], configured, words.settings)
    if rank >= high:
        expected = "0 with one node" if high == 1 else f"0 to {high - 1} with {high} nodes"
        raise UsageError(f"{words.node_rank}: got {rank}, expected {expected}")
    return rank


def _check_static(
    words: Words, endpoint: str, host: str, port: int | None, node_rank: int | None
) -> list[str]:
    if not port:
        raise UsageError(
            f"{words.endpoint}: got {endpoint!r}, expected HOST:PORT with the static rendezvous, "
            "the same on all nodes"
        )
    if not is_loopback_name(host):
        return []
    if node_rank:
        return [f"the static rendezvous is at {host}: node rank 0 must run here (see {words.endpoint})"]
    return [f"the static rendezvous is at {host}, for agents on this machine only (see {words.endpoint})"]
