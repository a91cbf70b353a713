"""Detect a Slurm or Kubernetes job, and set these options if the user has not. They depend on the back end::

    --standalone, or at most one node     only the number of workers
    c10d, elasticrs                       number of nodes, endpoint, run id, node order, host of the store
    etcd                                  number of nodes, run id, node order
    static                                number of nodes, this node's rank, address and port of rank 0
    another back end                      number of nodes, run id

The default back end is c10d, or ``static`` if the user has set an option of torchrun's static rendezvous.
"""

from __future__ import annotations

import os
from itertools import islice

from elasticrs._engine.job.config import DEFAULT_PORT, UsageError
from elasticrs._engine.job.options import OPTIONS, Namespace, set_by_variables
from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from typing import Any

MAX_DIGITS = 18
"""Maximum number of digits of a number in a variable. Longer numbers cannot come from a scheduler."""


WORKER_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Variable that elasticrun and torchrun set for each worker, and that no scheduler sets."""


def number_in(text: str) -> int | None:
    is_number = text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
    return int(text) if is_number else None


class Allocation(Value):
    """What a scheduler has allocated to this job, and which of its nodes this is.

    Args:
        job: name for messages, such as ``Slurm job 4711``.
        nodes: number of nodes; ``None`` if unknown.
        host: name of the node with rank 0; empty if this node is the only one, or if the name is unknown.
        workers: number of workers on this node, or a word that ``--nproc-per-node`` accepts.
        problem: why the nodes cannot meet, with a remedy. Ignored if the user has set how they meet.
        elastic_notices: lines that are shown only if the job can continue without a lost node.
        owned: options (:attr:`.Option.dest`) whose ``PET_`` variables the scheduler has set, not the user.
    """

    job: str
    nodes: int | None
    node_rank: int = 0
    host: str = ""
    port: int = 0
    run_id: str = ""
    workers: int | str | None = None
    problem: str = ""
    notices: Sequence[str] = ()
    elastic_notices: Sequence[str] = ()
    owned: frozenset[str] = frozenset()


def allocation_of(environ: Mapping[str, str], pid: int) -> Allocation | None:
    # Check for Slurm first, because Slurm nodes can themselves run in Kubernetes pods.
    if environ.get("SLURM_JOB_ID"):
        return slurm_allocation(environ, pid)

    return kubernetes_allocation(environ)


FIRST_PORT, PORTS = 29600, 3000
"""First of the ports from which a Slurm job step takes one, and their number. They are above torchrun's ports
(29400, 29500) and below Linux's ephemeral ports (from 32768).
"""
STEP_STRIDE = 97
"""Difference between the ports of consecutive steps of a job, so that they avoid the next jobs' ports."""
LARGEST_STEP = 0xFFFFFFF0
"""Largest id of a step started by ``srun``. Batch scripts and interactive shells have larger step ids."""

_STEP = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_NODEID")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def slurm_allocation(environ: Mapping[str, str], pid: int) -> Allocation:
    """Describe this process's Slurm job. Only the nodes of its job step are used, not all nodes of the job.

    Outside a step (batch script, ``salloc`` shell), and in a shell of ``srun --pty``, the job uses only this
    node: Slurm starts such a shell on each node, but the user can type in only one.
    ``SLURM_LAUNCH_NODE_IPADDR`` may be a login node, and ``scontrol`` is often missing in containers, so
    neither is used.
    """
    job = environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    step = _number(environ, "SLURM_STEP_ID")
    if step is None or step > LARGEST_STEP or _is_in_a_shell(environ, pid):
        return _outside_of_a_step(f"Slurm job {job}", environ)
    return _in_a_step(job, step, environ)


def _is_in_a_shell(environ: Mapping[str, str], pid: int) -> bool:
    """Return true if a shell of ``srun --pty`` has started this process, false if Slurm itself has."""
    return "SLURM_PTY_PORT" in environ and _number(environ, "SLURM_TASK_PID") != pid


def _outside_of_a_step(job: str, environ: Mapping[str, str]) -> Allocation:
    if "SLURMD_NODENAME" not in environ:
        # This is an `salloc` shell, which often runs on a login node outside the job.
        return Allocation(job, None, notices=(f"{job} is not used: start elasticrun with srun",))
    nodes = _number(environ, "SLURM_JOB_NUM_NODES") or 1
    why = f"{job} has {nodes} nodes, but only this one is used: start elasticrun with srun to use all of them"
    return Allocation(job, 1, workers=_task_workers(environ), notices=(why,) if nodes > 1 else ())


def _in_a_step(job: str, step: int, environ: Mapping[str, str]) -> Allocation:
    restarts = _number(environ, "SLURM_RESTART_COUNT")
    nodes = _number(environ, "SLURM_STEP_NUM_NODES")
    rank = _number(environ, "SLURM_NODEID")
    listed = environ.get("SLURM_STEP_NODELIST", "")
    host, problem = "", _problem_of_tasks(environ)
    try:
        hosts = expand(listed)
    except ValueError as error:
        hosts = []
        problem = problem or f"SLURM_STEP_NODELIST: got {listed!r}, expected {error}"
    if not problem and (nodes is None or rank is None or len(hosts) != nodes or rank >= nodes):
        got = ", ".join(f"{name}={environ.get(name)}" for name in _STEP)
        problem = f"its variables contradict each other ({got})"
    if not problem:
        host = hosts[0]
    return Allocation(
        f"Slurm job {job}",
        nodes or 1,
        rank or 0,
        host=host,
        port=_port(environ["SLURM_JOB_ID"], step),
        run_id=f"{job}.{step}" + (f"-restart{restarts}" if restarts else ""),
        workers=_task_workers(environ),
        problem=problem,
        elastic_notices=_losses(environ) if rank == 0 else (),
    )


def _problem_of_tasks(environ: Mapping[str, str]) -> str:
    """Return the problem if ``srun`` starts several tasks on a node, each of which would run an agent."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    # The value `8(x2),4` means 8 tasks on each of two nodes and 4 tasks on a third.
    if all(entry.partition("(")[0] == "1" for entry in tasks.split(",")):
        return ""
    return (
        f"srun starts several tasks on a node (SLURM_STEP_TASKS_PER_NODE={tasks}), but elasticrun starts the "
        "workers itself: use srun --ntasks-per-node=1"
    )


def _losses(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return warnings if environment variables show that Slurm may end the job when a node is lost. The
    command-line options of ``srun`` are not visible here.
    """
    lines = []
    if environ.get("SLURM_KILL_BAD_EXIT", "0") not in ("", "0"):
        lines.append("SLURM_KILL_BAD_EXIT ends the job as soon as one node leaves it: set it to 0")
    if environ.get("SLURM_NO_KILL") != "set":
        lines.append(
            "Slurm ends this job when one of its nodes fails, unless --no-kill is given to both sbatch and "
            "srun (SLURM_NO_KILL=set is equivalent to srun's option, and hides this line)"
        )
    return tuple(lines)


def _task_workers(environ: Mapping[str, str]) -> int | str | None:
    """Return the number of this task's GPUs; ``gpu`` for MIG slices, which the launcher counts later."""
    gpus = _number(environ, "SLURM_GPUS_ON_NODE")
    if not gpus:
        return None
    # With `--gpu-bind`, the task may see only some of the GPUs that the step has on this node.
    seen = next((environ[name] for name in _DEVICES if name in environ), None)
    if seen is None:
        return gpus
    if seen.startswith("MIG-"):
        return "gpu"
    return min(gpus, len(list(filter(None, seen.split(","))))) or None


def _port(job: str, step: int) -> int:
    return FIRST_PORT + ((number_in(job) or 0) + STEP_STRIDE * step) % PORTS


def _number(environ: Mapping[str, str], name: str) -> int | None:
    return number_in(environ.get(name, ""))


_ALLOWED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_[],")
MAX_HOSTS = 1 << 20
"""Maximum number of hosts, because a damaged list such as ``n[1-99999999999]`` would exhaust memory."""


def expand(text: str) -> list[str]:
    """Expand a host list, such as ``n[08-11],login``. A ``ValueError`` says what is expected.
    The last bracketed part varies fastest. Numbers are padded to the width of the first in their range.
    """
    if not _ALLOWED.issuperset(text):
        raise ValueError("a host list whose names have only letters, digits, '.', '-' and '_'")
    brackets = "".join(character for character in text if character in "[]")
    if brackets != "[]" * (len(brackets) // 2):
        raise ValueError("a host list with closed brackets that are not nested")
    found: list[str] = []
    names = [""]
    # The text is split at the brackets, so the parts with odd indexes were inside brackets.
    for index, part in enumerate(text.replace("]", "[").split("[")):
        if index % 2:
            choices = list(islice(_numbers(part), MAX_HOSTS + 1))
            if len(found) + len(names) * len(choices) > MAX_HOSTS:
                raise ValueError(f"a host list with at most {MAX_HOSTS} hosts")
            names = [name + choice for name in names for choice in choices]
            continue
        end, *others = part.split(",")
        names = [name + end for name in names]
        for other in others:
            found += names
            names = [other]
    found += names
    if "" in found:
        raise ValueError("a host list without empty names")
    return found


def _numbers(text: str) -> Iterator[str]:
    for span in text.split(","):
        low, dash, high = span.partition("-")
        first, last = number_in(low), number_in(high if dash else low)
        if first is None or last is None:
            raise ValueError("numbers and ranges in the brackets of a host list")
        if first > last:
            raise ValueError("ascending ranges in the brackets of a host list")
        if last - first >= MAX_HOSTS:
            raise ValueError(f"a host list with at most {MAX_HOSTS} hosts")
        for number in range(first, last + 1):
            yield str(number).zfill(len(low))


HOSTS = "/etc/hosts"
"""File to which Kubernetes writes the full name of a pod."""

_OF_KUBEFLOW = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
_OWNED = frozenset(name[4:].lower() for name in (*_OF_KUBEFLOW, "PET_NPROC_PER_NODE"))


def kubernetes_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return this process's position in a Kubernetes job of one of these kinds; ``None`` for any other job:

    =====================  ===============================================================================
    Kubeflow Trainer (v2)  ``PET_NNODES``, ``PET_NODE_RANK``, ``PET_MASTER_ADDR``, ``PET_MASTER_PORT``, and
                           an address of the form ``NAME-node-0-0.NAME``
    PyTorchJob             the same variables, and an address of the form ``NAME-master-0``
    indexed Job, JobSet    ``JOB_COMPLETION_INDEX``, and a host name that ends with this number. No
                           variable contains the number of pods
    =====================  ===============================================================================

    Users may set Kubeflow's variables, too. The form of the address shows who has set them.
    """
    if not all(map(environ.get, _OF_KUBEFLOW)):
        return _in_an_indexed_job(environ)
    address = environ["PET_MASTER_ADDR"]
    name = _name_in(address, "-node-0-0." + address.partition(".")[2])
    if name and address.endswith(f".{name}"):
        return _in_kubeflow(f"TrainJob {name}", name, environ)
    name = _name_in(address, "-master-0")
    # A PyTorchJob's operator also sets `RANK` and `MASTER_ADDR`. In a worker, both have other values.
    is_set = environ.get("MASTER_ADDR") == address and environ.get("RANK") == environ["PET_NODE_RANK"]
    if name and (is_set or WORKER_VARIABLE in environ):
        return _in_kubeflow(f"PyTorchJob {name}", name, environ)
    return None


def _in_kubeflow(job: str, name: str, environ: Mapping[str, str]) -> Allocation | None:
    nodes, rank, port = (
        number_in(environ[variable]) for variable in ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_PORT")
    )
    # Ignore an elastic PyTorchJob (its `PET_NNODES` is a range), because it configures the rendezvous itself.
    if nodes is None or rank is None or port is None:
        return None
    host = environ["PET_MASTER_ADDR"]
    return Allocation(job, nodes, rank, host=host, port=port, run_id=name, owned=_OWNED)


def _in_an_indexed_job(environ: Mapping[str, str]) -> Allocation | None:
    index = environ.get("JOB_COMPLETION_INDEX", "")
    rank = number_in(index)
    host = environ.get("HOSTNAME", "")
    name = _name_in(host, f"-{index}")
    if rank is None or not name:
        return None
    domain = _domain_of(host)
    return Allocation(
        f"Job {name}",
        None,
        rank,
        host=f"{name}-0.{domain}" if domain else "",
        port=DEFAULT_PORT,
        run_id=name,
        workers=_pod_workers(environ),
        problem=""
        if domain
        else "pods cannot find each other by name without a headless service: create one, "
        "and set the pods' spec.subdomain to its name",
    )


def _domain_of(host: str) -> str:
    try:
        with open(HOSTS, encoding="utf-8", errors="replace") as file:
            names = [name for line in file for name in line.partition("#")[0].split()[1:]]
    except OSError:
        return ""
    return next((name[len(host) + 1 :] for name in names if name.startswith(f"{host}.")), "")


def _name_in(text: str, suffix: str) -> str:
    return text[: -len(suffix)] if text.endswith(suffix) else ""


def _pod_workers(environ: Mapping[str, str]) -> int | str | None:
    """Return the GPU count (``gpu`` for MIG slices); ``None`` if ``NVIDIA_VISIBLE_DEVICES`` lists no GPUs."""
    devices = environ.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
    if devices[0].startswith("MIG-"):
        return "gpu"
    return len(devices) if all(device.startswith("GPU-") for device in devices) else None


_DEFAULTS = {option.dest: option.default for option in OPTIONS}
_OF_STATIC = frozenset(("node_rank", "master_addr", "master_port"))


def with_scheduler(args: Namespace, environ: Mapping[str, str], notices: list[str]) -> Namespace:
    """Complete the options with the scheduler's values. Report these values in ``notices``."""
    allocation = allocation_of(environ, os.getpid())
    if allocation is None:
        return args
    if WORKER_VARIABLE in environ:
        # The scheduler's variables describe the outer launcher's job, which this launcher must not join.
        notices.append(f"{allocation.job} is not used: this launcher runs in a worker of another launcher")
        return Namespace(
            **{**vars(args), **{name: _DEFAULTS[name] for name in allocation.owned - {*args.given}}}
        )
    given = frozenset((*(set_by_variables(environ) - allocation.owned), *args.given))
    found = found_options(args, allocation, given)
    if line := _line(args, allocation, found):
        notices.append(line)
    if not _says_how_to_meet(args, given):
        notices += allocation.notices
    low, high = found.get("nnodes", args.nnodes)
    if low < high and not args.standalone:
        notices += allocation.elastic_notices
    return Namespace(**{**vars(args), **found})


def _says_how_to_meet(args: Namespace, given: Collection[str]) -> bool:
    is_alone = args.nnodes[1] == 1
    has_address = not {"rdzv_endpoint", "master_addr"}.isdisjoint(given)
    return args.standalone or ("nnodes" in given and (is_alone or has_address))


def found_options(args: Namespace, allocation: Allocation, given: Collection[str]) -> dict[str, Any]:
    """Return the scheduler's values by option, except for options that the user has set (``given``)."""
    nodes = args.nnodes[1] if "nnodes" in given else allocation.nodes
    # If the number of nodes is unknown, ignore the problem, because the job uses only this node.
    if allocation.problem and nodes is not None:
        if _says_how_to_meet(args, given):
            return {}
        raise UsageError(f"{allocation.job}: {allocation.problem}; or use --standalone or --no-scheduler")
    found: dict[str, Any] = {}
    if allocation.workers is not None:
        found["nproc_per_node"] = allocation.workers
    if not args.standalone:
        if allocation.host and nodes not in (None, 1):
            found |= _meeting(args, allocation, given)
        if allocation.nodes is not None:
            found["nnodes"] = (allocation.nodes, allocation.nodes)
    # Keep `rdzv_conf` even if the user has set it, because it already includes the user's settings.
    return {name: value for name, value in found.items() if name not in given or name == "rdzv_conf"}


def _meeting(args: Namespace, allocation: Allocation, given: Collection[str]) -> dict[str, Any]:
    from elasticrs._engine.nodes.describe import BACKENDS, C10D, ETCD, STATIC, is_in_file

    if _says_how_to_meet(args, given) and args.nnodes[1] > (allocation.nodes or args.nnodes[1]):
        # A job with more nodes than the scheduler reports may have several job steps with different run ids,
        # so take no values for the rendezvous from the scheduler.
        return {}
    chosen = STATIC if _OF_STATIC.intersection(given) else C10D
    backend = args.rdzv_backend if "rdzv_backend" in given else chosen
    found: dict[str, Any] = {"rdzv_backend": backend}
    kind = BACKENDS.get(backend)
    if kind in (C10D, ETCD, STATIC):
        found["node_rank"] = allocation.node_rank
    if kind != STATIC:
        found["rdzv_id"] = allocation.run_id
        # Only the static rendezvous uses the master address and port, so drop the scheduler's values.
        found |= {
            name: _DEFAULTS[name] for name in ("master_addr", "master_port") if name in allocation.owned
        }
    if "rdzv_endpoint" in given:
        return found
    if kind == STATIC:
        found |= {"master_addr": allocation.host, "master_port": allocation.port}
    elif kind == C10D and not is_in_file(args.rdzv_conf):
        found["rdzv_endpoint"] = f"{allocation.host}:{allocation.port}"
        # Tell each node whether it is the host. A host cannot always recognize its own address: its name may
        # resolve to several addresses, or to one that none of its interfaces has.
        host = {"is_host": "1" if allocation.node_rank == 0 else "0"}
        found["rdzv_conf"] = {**host, **args.rdzv_conf}
    return found


def _line(args: Namespace, allocation: Allocation, found: Mapping[str, object]) -> str:
    parts = []
    if "nnodes" in found and allocation.nodes is not None:
        parts.append("1 node" if allocation.nodes == 1 else f"{allocation.nodes} nodes")
    if "node_rank" in found:
        parts.append(f"this is number {allocation.node_rank}")
    if "rdzv_endpoint" in found:
        parts.append(f"meeting at {found['rdzv_endpoint']}")
    elif found.get("master_addr") == allocation.host:
        parts.append(f"meeting at {allocation.host}:{found.get('master_port', args.master_port)}")
    # The number of workers for a word such as `gpu` is reported on a separate line.
    if isinstance(workers := found.get("nproc_per_node"), int):
        parts.append("1 worker on this node" if workers == 1 else f"{workers} workers on this node")
    return f"{allocation.job}: {', '.join(parts)}" if parts else ""
