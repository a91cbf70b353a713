"""Workers that a ``start_processes`` of the user's has started, for the agent's hooks."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from elasticrs.logs import line_prefix
from elasticrs.utils.api import macros
from elasticrs.worker_env import virtual_local_rank, worker_env

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticrs.compat.worker_group import WorkerSpec
    from elasticrs.multiprocessing.api import LogsSpecs, PContext, RunProcsResult
    from elasticrs.plan import Plan


def start_by(
    start_processes: Callable[..., PContext],
    spec: WorkerSpec,
    plan: Plan,
    restarts: int,
    *,
    logs_specs: LogsSpecs,
    start_method: str,
    prefix_template: str | None,
) -> GivenContext:
    """Start the workers of an attempt as torch's agent does: by this function, with torch's arguments.

    Args:
        start_processes: the user's.
        spec: of the workers.
        plan: ranks and addresses.
        restarts: charged so far.
        logs_specs: where their output goes.
        start_method: of functions.
        prefix_template: of console lines.
    """
    host = os.uname().nodename.split(".")[0]
    envs, args, prefixes = {}, {}, {}
    for ranks in plan.ranks:
        rank = ranks.local_rank
        own = worker_env(
            ranks,
            run_id=spec.rdzv_handler.get_run_id(),
            master_addr=plan.master_addr,
            master_port=plan.master_port,
            round=restarts + 1,
            restarts=restarts,
            max_restarts=spec.max_restarts,
            inherited=os.environ,
            use_agent_store=plan.use_agent_store,
        )
        if spec.virtual_local_rank:
            own.update(virtual_local_rank(rank, os.environ))
        envs[rank] = own
        args[rank] = tuple(macros.substitute(list(spec.args), str(rank)))
        prefixes[rank] = line_prefix(
            prefix_template, role=spec.role, local_rank=rank, rank=ranks.global_rank, hostname=host
        )
    try:
        context = start_processes(
            name=spec.role,
            entrypoint=spec.entrypoint,
            args=args,
            envs=envs,
            logs_specs=logs_specs,
            log_line_prefixes=prefixes if prefix_template else None,
            start_method=start_method,
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
        )
    except BaseException:
        plan.close()
        raise
    return GivenContext(context, plan)


class GivenContext:
    """Wraps the context of one start; what it does not have is the context's own.

    Args:
        context: ours, or anything like it.
        plan: holds the port of the workers' store.

    Attributes:
        has_failed: not known before all have ended.
        attempt: there is no record of it.
    """

    has_failed = False
    attempt = None

    def __init__(self, context: PContext, plan: Plan) -> None:
        self._context = context
        self._plan = plan
        self._is_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """As the context's."""
        return self._context.wait(timeout, period)

    def wait_for_news(self, seconds: float) -> None:
        """Nothing tells before it is looked at."""
        time.sleep(seconds)

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        """End the workers; once."""
        if not self._is_closed:
            self._is_closed = True
            try:
                self._context.close(death_sig or signal.SIGTERM, int(timeout))
            finally:
                self._plan.close()

    def release(self) -> None:
        """End what is left."""
        self.close()
