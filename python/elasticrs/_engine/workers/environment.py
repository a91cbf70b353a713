"""Environment variables of a worker, on which ``torch.distributed`` and users' scripts rely."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticrs._engine.job.config import JobSpec, Preload
    from elasticrs._engine.job.ranks import WorkerRanks
    from elasticrs._engine.workers.plan import Plan

TOKEN_VARIABLE = "ELASTICRS_TOKEN"
"""Environment variable with the token, a secret that a job's agents share.

The rendezvous settings may contain it instead.
"""

_HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "inside")
_HOOK = os.path.join(_HERE, "hook")
_NURSERY = os.path.join(_HERE, "nursery")

NCCL_ENDS_PROCESSES = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Variable that lets NCCL's watchdog kill the process when a collective fails."""


def worker_env(
    ranks: WorkerRanks,
    job: JobSpec,
    plan: Plan,
    *,
    round: int,  # noqa: A002 -- the usual name for this number
    restarts: int,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment variables that the agent sets for a worker.

    ``TORCHELASTIC_ERROR_FILE`` is not among them, because it is added later, with the paths of the log files.
    """
    return {
        "RANK": str(ranks.global_rank),
        "LOCAL_RANK": str(ranks.local_rank),
        "GROUP_RANK": str(ranks.group_rank),
        "ROLE_RANK": str(ranks.role_rank),
        "ROLE_NAME": ranks.role,
        "LOCAL_WORLD_SIZE": str(ranks.local_world_size),
        "WORLD_SIZE": str(ranks.world_size),
        "GROUP_WORLD_SIZE": str(ranks.group_world_size),
        "ROLE_WORLD_SIZE": str(ranks.role_world_size),
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
    """Return the variables that make a worker see only one GPU and use local rank 0, as in torch.

    Raise ``ValueError`` if the agent itself sees too few GPUs for a worker with this local rank.
    """
    names = ["CUDA_VISIBLE_DEVICES"]
    source = names[0]
    if inherited.get("HIP_VISIBLE_DEVICES"):
        source = "HIP_VISIBLE_DEVICES"
        names.append(source)
    visible = inherited.get(source)
    device = str(local_rank)
    if visible is not None:
        devices = visible.split(",")
        if local_rank >= len(devices):
            raise ValueError(f"local_rank {local_rank} exceeds available GPUs in {source}={visible}")
        device = devices[local_rank].strip()
    return {"LOCAL_RANK": "0", **dict.fromkeys(names, device)}


def inherited_environment() -> dict[str, str]:
    """Return the environment that workers inherit.

    Leave out the token of the job, because only agents need it.
    """
    return {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}


def hook_environment(env: dict[str, str]) -> dict[str, str]:
    """Return a copy of ``env`` in which Python loads the hook (our ``sitecustomize``) at its start.

    Leave out the hook if ``ELASTICRS_TRACEBACKS`` is 0.
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
    """Return the environment of a warm nursery, the process that imports modules and then forks the workers.

    See ``_engine/inside/nursery/nursery.py``.
    """
    import json

    entries = [entry for entry in (env.get("PYTHONPATH") or _HOOK).split(os.pathsep) if entry != _HOOK]
    settings = {name: getattr(preload, name) for name in ("steps", "is_explicit", "folders")}
    return {
        **env,
        "PYTHONPATH": os.pathsep.join([_NURSERY, *entries]),
        "ELASTICRS_WARM": json.dumps(settings),
        "ELASTICRS_WARM_CORE": core,
    }
