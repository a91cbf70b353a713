"""Runs the workers of torch's agent class in the event-driven loop that the command line also uses."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING

from elasticrs._engine.job.ranks import NodeShare, assign
from elasticrs._engine.job.value import Record
from elasticrs._engine.process.console import Console
from elasticrs._engine.supervise.attempts.state_machine import Phase
from elasticrs._engine.supervise.run.signals import catch_signals
from elasticrs._engine.supervise.run_job import make_decisions, run_job
from elasticrs._engine.workers.functions.supervised_group import not_started
from elasticrs._engine.workers.plan import Plan
from elasticrs.agent.server.local_job import LocalJob, own_consoles
from elasticrs.agent.server.worker_group import RunResult, WorkerState
from elasticrs.multiprocessing.api import SignalException
from elasticrs.rendezvous.api import RendezvousClosedError
from elasticrs.rendezvous.one_node_handler import OneNodeRendezvous

if TYPE_CHECKING:
    from elasticrs import _core
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
    from elasticrs._engine.supervise.attempts.attempt import JobResult
    from elasticrs._engine.supervise.decide.decisions import Decisions
    from elasticrs._engine.supervise.observe.health_check_server import HealthCheckServer
    from elasticrs._engine.supervise.run.loop import Agent
    from elasticrs.agent.server.worker_group import WorkerGroup


class EventRunner(Record):
    """Runs a job once.

    Args:
        group: the user's worker group, which the runner keeps up to date.
        local: settings and workers of this node.
        rendezvous: rendezvous of several nodes; ``None`` for a single node.
        server: open health check server, for which the agent's loop answers requests; ``None`` if there is no
            server.
        restarts: number of charged restarts.
        agent: the agent that runs the job; ``None`` before the run.
    """

    _group: WorkerGroup
    _local: LocalJob
    _rendezvous: Rendezvous | None
    _server: HealthCheckServer | None
    restarts: int = 0
    agent: Agent | None = None

    def run(self) -> RunResult:
        """Run the job; see :meth:`elasticrs.agent.server.LocalElasticAgent.run`."""
        job = self._local.config(self._rendezvous)
        if job.is_multi_node and self._group.spec.rdzv_handler.is_closed():
            raise RendezvousClosedError(f"the rendezvous of job {job.run_id} is closed")
        signals = catch_signals((*job.signals, *job.forwarded))
        console = Console(log_prefix=job.log_prefix, is_one_of_several=job.is_multi_node)
        if signals is None:
            # Print a line instead of issuing a Python warning, because the program may turn warnings into
            # errors.
            console.say("signals are not handled, because the job does not run in the main thread")
        decisions = self._decisions(job, console)
        try:
            result = run_job(
                *(job, console, signals),
                owns_process=False,
                created=self._created,
                decisions=decisions,
                server=self._server,
                observers=self._local.observers(),
                consoles=own_consoles(),
            )
        finally:
            if signals is not None:
                signals.close()
        return self._run_result(job, result, decisions)

    def _created(self, agent: Agent) -> None:
        self.agent = agent

    def _decisions(self, job: JobSpec, console: Console) -> Decisions:
        handler, group = self._group.spec.rdzv_handler, self._group
        planner = partial(_plan, group, handler) if isinstance(handler, OneNodeRendezvous) else None
        decisions = make_decisions(job, console, planner)
        decisions.planned, decisions.kept = group.take_plan, getattr(handler, "kept", None)
        return decisions

    def _run_result(self, job: JobSpec, result: JobResult, decisions: Decisions) -> RunResult:
        group = self._group
        self.restarts = result.restarts
        if result.phase is Phase.SUCCEEDED:
            group.state = WorkerState.SUCCEEDED
            return RunResult(WorkerState.SUCCEEDED, return_values=result.return_values)
        if result.signum is not None:
            group.state = WorkerState.STOPPED
            sigval = signal.Signals(result.signum)
            raise SignalException(f"stopped by {sigval.name}", sigval)
        from elasticrs._engine.failures.root_cause import root_cause
        from elasticrs._engine.job.policy_options import ExitCodes
        from elasticrs._engine.supervise.observe.job_report import all_failures, exit_code

        group.state = WorkerState.FAILED
        failed = all_failures(result)
        code = exit_code(ExitCodes.parse(job.exit_codes), result, failed)
        if failed:
            if result.message is not None:
                root = failed[root_cause(failed)]
                root.more_notes = [*root.more_notes, result.message]
            return RunResult(
                WorkerState.FAILED,
                failures=failed,
                verdict=result.verdict.value,
                exit_code=code,
                reason=result.message,
            )
        outcome = getattr(decisions, "outcome", None)
        if outcome is not None and outcome.kind not in {"failed", "stuck", "excluded"}:
            from elasticrs.rendezvous.elastic_handler import error_of

            raise error_of(outcome)
        error = not_started(result.message or "the workers could not be started", result.start_errno)
        error.verdict, error.exit_code, error.reason = result.verdict.value, code, result.message
        raise error


def _plan(group: WorkerGroup, handler: OneNodeRendezvous, supervisor: _core.Supervisor) -> Plan:
    """Plan an attempt of a single-node job. The handler, which gives the addresses, stays open, because the
    agent may run again.
    """
    bootstrap = handler.next_served_by(supervisor)
    plan = Plan(
        assign([NodeShare(group.spec.role, group.spec.local_world_size)], 0),
        bootstrap.master_addr,
        bootstrap.master_port,
        handler.store_port,
        use_agent_store=handler.use_agent_store,
    )
    group.take_plan(plan, handler.open_shared_store)
    return plan
