"""The environment of a worker: the contract that ``torch.distributed`` and users' scripts rely on."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticrs.ranks import WorkerRanks

NCCL_ENDS_PROCESSES = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Variable that decides whether NCCL's watchdog kills the process when a collective fails."""


def worker_env(
    ranks: WorkerRanks,
    *,
    run_id: str,
    master_addr: str,
    master_port: int,
    round: int,  # noqa: A002 -- the field's own word
    restarts: int,
    max_restarts: int,
    inherited: Mapping[str, str],
    use_agent_store: bool = False,
    timer_file: str | None = None,
) -> dict[str, str]:
    """Return the variables that the agent adds for one worker; ``TORCHELASTIC_ERROR_FILE`` comes with the log
    layout.

    Args:
        ranks: ranks of the worker.
        run_id: name of the job.
        master_addr: address of the workers' store.
        master_port: port of the workers' store.
        round: number of the attempt, from 1. Attempts that cost no restart count as well.
        restarts: number of restarts charged so far.
        max_restarts: maximum number of charged restarts.
        inherited: environment of the agent.
        use_agent_store: true if an agent serves the store; otherwise rank 0 does.
        timer_file: path of the FIFO of the agent's timers. It is also set in a variable of ours, which tells
            our client that our agent reads the FIFO. The client then keeps the FIFO open, which would prevent
            torch's server from expiring timers.
    """
    timers = {"TORCHELASTIC_TIMER_FILE": timer_file, "ELASTICRS_TIMER_FILE": timer_file} if timer_file else {}
    return {
        **timers,
        "RANK": str(ranks.global_rank),
        "LOCAL_RANK": str(ranks.local_rank),
        "GROUP_RANK": str(ranks.group_rank),
        "ROLE_RANK": str(ranks.role_rank),
        "ROLE_NAME": ranks.role,
        "LOCAL_WORLD_SIZE": str(ranks.local_world_size),
        "WORLD_SIZE": str(ranks.world_size),
        "GROUP_WORLD_SIZE": str(ranks.group_world_size),
        "ROLE_WORLD_SIZE": str(ranks.role_world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(use_agent_store),
        NCCL_ENDS_PROCESSES: inherited.get(NCCL_ENDS_PROCESSES, "1"),
        "ELASTICRS_ROUND": str(round),
    }


def virtual_local_rank(local_rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker that sees one GPU and has local rank 0.

    As in torch, a ``HIP_VISIBLE_DEVICES`` that is not empty takes precedence, and is then set as well.

    Raises:
        ValueError: the agent sees fewer GPUs.
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
