"""Plan of an attempt to run the workers: their ranks, the port of their store, and their environment.

As in torch, every node computes the same ranks. Global ranks follow the order of the nodes (the group ranks).
Role ranks only count workers with the same role. ``torch.distributed`` and users' scripts read the variables.
"""

from __future__ import annotations

import _socket
import errno
import os

from elasticrs._engine.job.value import Record, Value, fresh

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from dataclasses import KW_ONLY

    from elasticrs import _core
    from elasticrs._engine.job.config import JobSpec, Preload
    from elasticrs._engine.workers.node_page import AgentPage

TOKEN_VARIABLE = "ELASTICRS_TOKEN"
"""Environment variable with the token, a secret that a job's agents share, unless a setting has it."""

KEEP = "ELASTICRS_KEEP"
"""Environment variable that tells a worker where the file is into which it copies its training state. The
constant ``VARIABLE`` in ``inside/keep/layout.py`` has the same value. It is not used here, because the agent
imports that module only after the first start of the workers.
"""
KEPT = "ELASTICRS_KEPT"
"""Environment variable that tells a worker the newest step that it may restore. The constant
``KEPT_VARIABLE`` in ``inside/keep/layout.py`` has the same value.
"""
KEEP_OFF = "keep: no state is kept, because the agent cannot use its files in memory: {}"
KEEP_FRAMEWORKS = "ELASTICRS_KEEP_FRAMEWORKS"
"""Environment variable that tells the hook in the workers to keep the training state of Lightning and
transformers (``--keep``).
"""

_HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "inside")
_HOOK = os.path.join(_HERE, "hook")
_NURSERY = os.path.join(_HERE, "nursery")

NCCL_ENDS_PROCESSES = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Variable that lets NCCL's watchdog kill the process when a collective fails."""


class MemoryFiles:
    """Files in memory (memfds), one for each of a node's workers, into which the workers copy their training
    state. The kernel deletes the files when the agent exits. At first, they are empty. After the first start
    of the workers, the agent writes into each file a plan, which tells the worker what to restore. A worker
    that opens its file earlier waits for the plan.

    Args:
        workers: number of workers.

    Raises:
        OSError: the files cannot be created.

    Attributes:
        mark: random number in the head of each file, by which workers recognize the file.
        fds: file descriptors, by local rank.
        places: value of each worker's environment variable ``ELASTICRS_KEEP``, by local rank.
        stay_open: true if a thread still reads the files, so that :meth:`close` must do nothing.
    """

    def __init__(self, workers: int) -> None:
        self.mark = int.from_bytes(os.urandom(7), "big")
        self.fds: list[int] = []
        self.places: list[str] = []
        self.stay_open = False
        try:
            for _ in range(workers):
                self.fds.append(os.memfd_create("elasticrs-keep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        except OSError:
            self.close()
            raise
        # In another pid namespace (a container), this path may lead to another file. So each worker compares
        # the mark with that in the file.
        self.places = [f"{self.mark}:/proc/{os.getpid()}/fd/{fd}" for fd in self.fds]

    def close(self) -> None:
        """Close the files, so that the kernel deletes them with all copies. Idempotent."""
        if self.stay_open:
            return
        fds, self.fds, self.places = self.fds, [], []
        for fd in fds:
            os.close(fd)


class NodeShare(Value):
    role: str
    local_world_size: int


class WorkerRanks(Value):
    role: str
    local_rank: int
    global_rank: int
    group_rank: int
    role_rank: int
    local_world_size: int
    world_size: int
    group_world_size: int
    role_world_size: int


def assign(nodes: Sequence[NodeShare], group_rank: int) -> list[WorkerRanks]:
    """Return the ranks of one node's workers, by local rank. ``nodes`` is in the order of group ranks."""
    if not 0 <= group_rank < len(nodes):
        raise IndexError(f"group rank {group_rank} of {len(nodes)} nodes")
    return node_ranks(nodes)[group_rank].workers(nodes[group_rank])


class NodeRanks(Value):
    """Ranks and world sizes of a node. ``group_world_size`` counts nodes, the others count workers."""

    group_rank: int
    group_world_size: int
    first_rank: int
    world_size: int
    first_role_rank: int
    role_world_size: int

    def workers(self, me: NodeShare) -> list[WorkerRanks]:
        return [
            WorkerRanks(
                role=me.role,
                local_rank=local_rank,
                global_rank=self.first_rank + local_rank,
                group_rank=self.group_rank,
                role_rank=self.first_role_rank + local_rank,
                local_world_size=me.local_world_size,
                world_size=self.world_size,
                group_world_size=self.group_world_size,
                role_world_size=self.role_world_size,
            )
            for local_rank in range(me.local_world_size)
        ]


def node_ranks(nodes: Sequence[NodeShare]) -> list[NodeRanks]:
    """Return the ranks of each node's first worker, in the order of group ranks, in linear time."""
    sizes: dict[str, int] = {}
    for node in nodes:
        sizes[node.role] = sizes.get(node.role, 0) + node.local_world_size
    world_size = sum(sizes.values())
    first, first_in_role, ranks = 0, dict.fromkeys(sizes, 0), []
    for group_rank, node in enumerate(nodes):
        role_rank = first_in_role[node.role]
        ranks.append(NodeRanks(group_rank, len(nodes), first, world_size, role_rank, sizes[node.role]))
        first += node.local_world_size
        first_in_role[node.role] = role_rank + node.local_world_size
    return ranks


class Plan(Record):
    """Ranks and addresses of the workers in an attempt. ``port`` reserves the port of the workers' store; it
    is ``None`` if another agent does so. ``members`` are the names under which the workers register in a
    rendezvous of their own, by local rank; ``None`` if they have none. A worker that is replaced keeps its
    name until its replacement has been started. ``keep_places`` has, by local rank, the names of the files
    into which the workers copy their training state (see :attr:`MemoryFiles.places`).
    """

    ranks: Sequence[WorkerRanks]
    master_addr: str
    master_port: int
    port: StorePort | None = None
    _: KW_ONLY
    use_agent_store: bool = False
    variables: Mapping[str, str] = fresh(factory=dict)
    members: dict[int, str] | None = None
    member_prefix: str = ""
    page: AgentPage | None = None
    keep_places: Sequence[str] = ()

    def close(self) -> None:
        if self.port is not None:
            self.port.close()


def rank_variables(ranks: WorkerRanks) -> dict[str, str]:
    """Return the variables with ranks and world sizes that change if a node joins or leaves."""
    return {
        "RANK": str(ranks.global_rank),
        "GROUP_RANK": str(ranks.group_rank),
        "ROLE_RANK": str(ranks.role_rank),
        "WORLD_SIZE": str(ranks.world_size),
        "GROUP_WORLD_SIZE": str(ranks.group_world_size),
        "ROLE_WORLD_SIZE": str(ranks.role_world_size),
    }


def worker_env(
    ranks: WorkerRanks,
    job: JobSpec,
    plan: Plan,
    *,
    round: int,  # noqa: A002 -- the usual name for this number
    restarts: int,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables that the agent sets for a worker, except ``TORCHELASTIC_ERROR_FILE``."""
    return {
        **rank_variables(ranks),
        "LOCAL_RANK": str(ranks.local_rank),
        "ROLE_NAME": ranks.role,
        "LOCAL_WORLD_SIZE": str(ranks.local_world_size),
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(plan.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(plan.use_agent_store),
        NCCL_ENDS_PROCESSES: inherited.get(NCCL_ENDS_PROCESSES, "1"),
        "ELASTICRS_ROUND": str(round),
    }


def virtual_local_rank(local_rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make a worker see only one GPU and use local rank 0, as in torch. Raise
    ``ValueError`` if the agent itself sees too few GPUs for a worker with this local rank.
    """
    source = "HIP_VISIBLE_DEVICES" if inherited.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"
    visible = inherited.get(source)
    device = str(local_rank)
    if visible is not None:
        devices = visible.split(",")
        if local_rank >= len(devices):
            raise ValueError(f"local_rank {local_rank} exceeds available GPUs in {source}={visible}")
        device = devices[local_rank].strip()
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": device, source: device}


def inherited_environment() -> dict[str, str]:
    """Return the environment of this process as its workers inherit it. Leave out the job's token, because it
    is a secret of the agents. If this process is itself a worker of another job, also leave out that job's
    variables about kept training state.
    """
    own = (TOKEN_VARIABLE, KEEP, KEPT, KEEP_FRAMEWORKS)
    return {name: value for name, value in os.environ.items() if name not in own}


def hook_environment(env: dict[str, str]) -> dict[str, str]:
    """Return a copy of ``env`` that makes Python load our hook (``sitecustomize.py`` in the folder ``hook``),
    unless ``ELASTICRS_TRACEBACKS`` is 0.
    """
    worker_env = dict(env)
    # A directory whose name contains a colon cannot be an entry of PYTHONPATH.
    if env.get("ELASTICRS_TRACEBACKS") == "0" or os.pathsep in _HOOK:
        return worker_env
    entries = [_HOOK]
    if "PYTHONPATH" in env:
        # If PYTHONPATH is set but empty, add the hook's directory twice, so that the hook restores the empty
        # value. An empty entry would make Python search the working directory.
        entries.append(env["PYTHONPATH"] or _HOOK)
    worker_env["PYTHONPATH"] = os.pathsep.join(entries)
    return worker_env


def warm_environment(env: dict[str, str], preload: Preload, core: str) -> dict[str, str]:
    """Return the environment of a nursery (the process that imports modules and then forks the workers)."""
    import json

    entries = [entry for entry in (env.get("PYTHONPATH") or _HOOK).split(os.pathsep) if entry != _HOOK]
    settings = {name: getattr(preload, name) for name in ("steps", "is_explicit", "folders")}
    return {
        **env,
        "PYTHONPATH": os.pathsep.join([_NURSERY, *entries]),
        "ELASTICRS_WARM": json.dumps(settings),
        "ELASTICRS_WARM_CORE": core,
    }


def agent_hosts_store(environ: Mapping[str, str]) -> bool:
    """Return true if the agent, not rank 0, hosts the workers' ``TCPStore`` when the user gives no port. An
    environment variable of torch can forbid this.
    """
    return environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"


class StorePort:
    """Port for the workers' store, reserved until :meth:`close`. ``store`` is ``None`` if rank 0 hosts it.

    To keep other processes from taking the port, it stays *bound* with SO_REUSEADDR, but does not listen. The
    kernel then does not assign it as an ephemeral port, and refuses a ``bind`` without SO_REUSEADDR. Torch's
    TCPStore sets SO_REUSEADDR (both with libuv and in the older server), so it can bind the port.
    """

    __slots__ = ("_socket", "number", "store")

    def __init__(self, ports: tuple[int, int] | None = None, *, is_served: bool) -> None:
        self.number: int
        self.store: _core.WorkerStore | None = None
        self._socket: _socket.socket | None = None
        if is_served:
            from elasticrs import _core

            self.store = _core.WorkerStore() if ports is None else _core.WorkerStore(None, ports)
            self.number = self.store.port
        else:
            self._socket = bind(0) if ports is None else _bind_one_of(*ports)
            self.number = self._socket.getsockname()[1]

    def serve(self, supervisor: _core.Supervisor | None) -> None:
        """Let the store, if hosted here, answer clients. ``supervisor`` reports the store's messages."""
        if self.store is not None:
            self.store.serve(supervisor)

    def close(self) -> None:
        for held in (self.store, self._socket):
            if held is not None:
                held.close()


def _bind_one_of(first: int, last: int) -> _socket.socket:
    for port in range(first, last):
        try:
            return bind(port)
        except OSError as error:  # noqa: PERF203 -- the system call costs more than `try`
            if error.errno != errno.EADDRINUSE:
                raise
    return bind(last)


def bind(port: int, *, reuses_address: bool = True) -> _socket.socket:
    """Return a socket bound to ``port`` (any if 0) on all addresses. Raise ``OSError`` if it is not free."""
    try:
        return _bind_family(_socket.AF_INET6, port, reuses_address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        # The kernel may have no IPv6, so try IPv4. If no descriptor is free, this raises the error again.
        return _bind_family(_socket.AF_INET, port, reuses_address)


def _bind_family(family: int, port: int, reuses_address: bool) -> _socket.socket:
    sock = _socket.socket(family, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, reuses_address)
        if family == _socket.AF_INET6:
            sock.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
        sock.bind(("", port))
    except BaseException:
        sock.close()
        raise
    return sock
