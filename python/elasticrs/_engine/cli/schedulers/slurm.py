"""Detect a Slurm job. The nodes are those of the step (``srun``), because it may use fewer nodes than the
job. A process outside a step, such as a batch script or an ``salloc`` shell, uses only this node. A launcher
in a shell of ``srun --pty`` also uses only this node, because Slurm starts a shell on each node of the step,
but the user can type in only one of these shells.

Host lists are expanded here, because Slurm's own tool for it, ``scontrol``, is often missing in containers.

``SLURM_LAUNCH_NODE_IPADDR`` is not used. It is the address of ``srun``, which may run on a login node.
"""

from __future__ import annotations

from itertools import islice

from elasticrs._engine.cli.schedulers import Place, number_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FIRST_PORT, PORTS = 29600, 3000
"""First port and number of ports in the range from which a step's port is chosen. The range lies above the
usual torchrun ports (29400, 29500), and below Linux's ephemeral ports (from 32768).
"""
STEP_STRIDE = 97
"""Port distance between consecutive steps. It keeps a job's steps off the ports of jobs with the next ids."""
LARGEST_STEP = 0xFFFFFFF0
"""Largest id of a step started by ``srun``. Batch scripts and interactive shells have larger step ids."""

_STEP = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_NODEID")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def place_of(environ: Mapping[str, str], pid: int) -> Place:
    """Describe this process's Slurm job and the rank of this node in the job.

    Args:
        environ: environment variables of this process, with ``SLURM_JOB_ID``.
        pid: pid of this process.
    """
    job = environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    step = _number(environ, "SLURM_STEP_ID")
    if step is None or step > LARGEST_STEP or _is_in_a_shell(environ, pid):
        return _outside_of_a_step(f"Slurm job {job}", environ)
    return _in_a_step(job, step, environ)


def _is_in_a_shell(environ: Mapping[str, str], pid: int) -> bool:
    """Return true if a user has started this process in a shell of ``srun --pty``. Return false for ``srun
    --pty elasticrun``, because there Slurm has started this process as the task itself.
    """
    return "SLURM_PTY_PORT" in environ and _number(environ, "SLURM_TASK_PID") != pid


def _outside_of_a_step(job: str, environ: Mapping[str, str]) -> Place:
    if "SLURMD_NODENAME" not in environ:
        # This is an `salloc` shell, which often runs on a login node outside the job.
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
        # Report these lines on one node only, so that they do not appear once per node.
        elastic_notices=_losses(environ) if rank == 0 else (),
    )


def _problem_of_tasks(environ: Mapping[str, str]) -> str:
    """Return an error message if ``srun`` starts several tasks on a node, because each task would run an
    agent. Otherwise return an empty string.
    """
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    # The value `8(x2),4` means 8 tasks on each of two nodes and 4 tasks on a third.
    if all(entry.partition("(")[0] == "1" for entry in tasks.split(",")):
        return ""
    return (
        f"srun starts several tasks on a node (SLURM_STEP_TASKS_PER_NODE={tasks}), but elasticrun starts the "
        "workers itself: use srun --ntasks-per-node=1"
    )


def _losses(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a warning line for each setting that makes Slurm end the job when a node is lost. Check only
    environment variables, because the job cannot see the options given to ``sbatch`` and ``srun``.
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


def _workers(environ: Mapping[str, str]) -> int | str | None:
    """Return the number of workers, which is the number of GPUs that this task may use.

    Return ``gpu`` for MIG slices, which lets the launcher count them later. Return ``None`` if Slurm has
    assigned no GPUs.
    """
    gpus = _number(environ, "SLURM_GPUS_ON_NODE")
    if not gpus:
        return None
    # With `--gpu-bind`, the task may see only some of the GPUs that the step has on this node.
    seen = next((environ[name] for name in _DEVICES if name in environ), None)
    if seen is None:
        return gpus
    if seen.startswith("MIG-"):
        # Do not count MIG slices as devices; see `elasticrs._engine.gpus.devices`.
        return "gpu"
    return min(gpus, len(list(filter(None, seen.split(","))))) or None


def _port(job: str, step: int) -> int:
    return FIRST_PORT + ((number_in(job) or 0) + STEP_STRIDE * step) % PORTS


def _number(environ: Mapping[str, str], name: str) -> int | None:
    return number_in(environ.get(name, ""))


_ALLOWED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_[],")
MAX_HOSTS = 1 << 20
"""Maximum number of hosts in a list. Without this limit, a damaged list such as ``n[1-99999999999]`` would
exhaust memory.
"""


def expand(text: str) -> list[str]:
    """Expand a host list into host names, in the order of the list.

    If a name has several bracketed parts, the result contains all combinations, and the last part varies
    fastest. Numbers are padded with zeros to the width of the first number in their range, so ``n[08-11]``
    starts with ``n08``.

    Args:
        text: comma-separated names. A name may have brackets with comma-separated numbers and ranges.

    Raises:
        ValueError: the text is not a valid host list, or it has more than :data:`MAX_HOSTS` hosts. The
            message says what was expected.
    """
    found: list[str] = []
    for entry in _entries(text):
        if not _ALLOWED.issuperset(entry):
            raise ValueError("a host list whose names have only letters, digits, '.', '-' and '_'")
        names = [""]
        for number, part in enumerate(_parts(entry)):
            choices = list(islice(_numbers(part), MAX_HOSTS + 1)) if number % 2 else [part]
            if len(found) + len(names) * len(choices) > MAX_HOSTS:
                raise ValueError(f"a host list with at most {MAX_HOSTS} hosts")
            names = [name + choice for name in names for choice in choices]
        found += names
    return found


def _entries(text: str) -> Iterator[str]:
    """Split a host list at commas outside brackets, and yield the parts."""
    depth = start = 0
    for index, character in enumerate(text + ","):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == "," and depth == 0:
            if not text[start:index]:
                raise ValueError("a host list without empty names")
            yield text[start:index]
            start = index + 1
        if depth not in (0, 1):
            raise ValueError("a host list with closed brackets that are not nested")
    if depth:
        raise ValueError("a host list with closed brackets")


def _parts(entry: str) -> list[str]:
    """Split a name at its brackets. The parts with odd indexes are the contents of the brackets."""
    return entry.replace("]", "[").split("[")


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
