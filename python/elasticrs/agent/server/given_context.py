"""Process context for workers that were started by a user-defined ``start_processes`` function. Used by the
agent's hooks.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from elasticrs._engine.supervise.run.workers import variables_of
from elasticrs._engine.workers.logs import line_prefixes
from elasticrs._engine.workers.process import macros

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticrs._engine.workers.plan import Plan
    from elasticrs.agent.server.local_job import LocalJob
    from elasticrs.agent.server.worker_group import WorkerSpec
    from elasticrs.multiprocessing.api import PContext


def start_by(
    start_processes: Callable[..., PContext], spec: WorkerSpec, local: LocalJob, plan: Plan, restarts: int
) -> GivenContext:
    """Start the workers of an attempt by calling the user's function, with the same arguments that torch's
    agent passes.
    """
    template = local.prefix_template
    try:
        context = start_processes(
            name=spec.role,
            entrypoint=spec.entrypoint,
            args={
                rank: tuple(macros.substitute(list(spec.args), str(rank)))
                for rank in range(spec.local_world_size)
            },
            envs=variables_of(local.config(), plan, restarts + 1, restarts, os.environ),
            logs_specs=local.logs_specs,
            log_line_prefixes=line_prefixes(template, plan.ranks) if template else None,
            start_method=local.start_method,
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
        )
    except BaseException:
        plan.close()
        raise
    return GivenContext(context, plan)


class GivenContext:
    """Wrapper around the process context that the user's ``start_processes`` has returned. Keeps the workers'
    port reserved until the context is closed, and forwards all other attributes to the context.

    Failures are reported only after all workers have exited.
    """

    has_failed = False
    attempt = None

    def __init__(self, context: PContext, plan: Plan) -> None:
        self._context = context
        self._plan = plan
        self._is_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def wait_for_news(self, seconds: float) -> None:
        """Sleep for ``seconds`` between two polls of the workers. Polling is necessary, because no event
        reports the exit of a worker.
        """
        time.sleep(seconds)

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        """Stop the workers, and release the port that was reserved for them. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            try:
                self._context.close(death_sig or signal.SIGTERM, int(timeout))
            finally:
                self._plan.close()

    def release(self) -> None:
        """Stop the remaining workers."""
        self.close()
