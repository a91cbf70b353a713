"""A job of Slurm. The variables of its step describe the nodes, because a step (``srun``) may have fewer
nodes than the job. A process that ``srun`` did not start is alone: a batch script, or the shell of
``salloc``.

``SLURM_LAUNCH_NODE_IPADDR`` is never used: it is the address of ``srun``, which may run on a login node.
"""

from __future__ import annotations

from elasticrs.schedulers.host_list import expand
from elasticrs.schedulers.place import Place

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

FIRST_PORT, PORTS = 29600, 3000
"""Range from which the port of a step is chosen. It is above the ports that users of torchrun write (29400,
29500), and below the ports that Linux gives to outgoing connections (from 32768).
"""
STEP_STRIDE = 97
"""Distance between the ports of two steps of a job, so that jobs with consecutive ids do not meet them."""
LARGEST_STEP = 0xFFFFFFF0
"""Largest id of a step that ``srun`` started. Batch scripts and interactive shells have larger ids."""

_STEP = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_NODEID")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def place_of(environ: Mapping[str, str]) -> Place:
    """Return the place of this process in its job.

    Args:
        environ: environment variables of this process, with ``SLURM_JOB_ID``.
    """
    job = environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    step = _number(environ, "SLURM_STEP_ID")
    if step is None or step > LARGEST_STEP:
        return _outside_of_a_step(f"Slurm job {job}", environ)
    return _in_a_step(job, step, environ)


def _outside_of_a_step(job: str, environ: Mapping[str, str]) -> Place:
    if "SLURMD_NODENAME" not in environ:
        # The shell of `salloc` often runs on a login node, so nothing about this machine is known.
        return Place(job, None, notices=(f"{job} is not used: start elasticrun with srun",))
    nodes = _number(environ, "SLURM_JOB_NUM_NODES") or 1
    why = f"{job} has {nodes} nodes, but only this one is used: start elasticrun with srun to use all of them"
    return Place(job, 1, workers=_workers(environ), notices=(why,) if nodes > 1 else ())


def _in_a_step(job: str, step: int, environ: Mapping[str, str]) -> Place:
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
    return Place(
        f"Slurm job {job}",
        nodes or 1,
        rank or 0,
        host=host,
        port=_port(environ["SLURM_JOB_ID"], step),
        run_id=f"{job}.{step}" + (f"-restart{restarts}" if restarts else ""),
        workers=_workers(environ),
        problem=problem,
        # One node says it for all.
        elastic_notices=_losses(environ) if rank == 0 else (),
    )


def _problem_of_tasks(environ: Mapping[str, str]) -> str:
    """Return a message if ``srun`` starts several tasks on a node, and with them several agents."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    # The format is `8(x2),4`: 8 tasks on each of two nodes, 4 on a third one.
    if all(entry.partition("(")[0] == "1" for entry in tasks.split(",")):
        return ""
    return (
        f"srun starts several tasks on a node (SLURM_STEP_TASKS_PER_NODE={tasks}), but elasticrun starts the "
        "workers itself: use srun --ntasks-per-node=1"
    )


def _losses(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for each setting with which Slurm would end the job when a node is lost. The options of
    ``sbatch`` and ``srun`` set no variables, so only what the user has exported is known.
    """
    lines = []
    if environ.get("SLURM_KILL_BAD_EXIT", "0") not in ("", "0"):
        lines.append("SLURM_KILL_BAD_EXIT ends the job as soon as one node leaves it: set it to 0")
    if environ.get("SLURM_NO_KILL") != "set":
        lines.append(
            "Slurm ends this job when one of its nodes fails, unless both sbatch and srun have --no-kill "
            "(SLURM_NO_KILL=set replaces the option of srun, and hides this line)"
        )
    return tuple(lines)


def _workers(environ: Mapping[str, str]) -> int | str | None:
    """Return a worker for each GPU that Slurm gave to this task; ``None`` if it gave none."""
    gpus = _number(environ, "SLURM_GPUS_ON_NODE")
    if not gpus:
        return None
    # The task may see fewer GPUs than its step has (`--gpu-bind`).
    seen = next((environ[name] for name in _DEVICES if name in environ), None)
    if seen is None:
        return gpus
    if seen.startswith("MIG-"):
        # Slices are not counted as devices; see `elasticrs.host.devices`.
        return "gpu"
    return min(gpus, len(list(filter(None, seen.split(","))))) or None


def _port(job: str, step: int) -> int:
    number = int(job) if job.isdecimal() else 0
    return FIRST_PORT + (number + STEP_STRIDE * step) % PORTS


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else None
