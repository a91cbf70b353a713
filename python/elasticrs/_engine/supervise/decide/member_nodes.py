"""Decisions of one node's agent in a multi-node job with ``--on-failure replace``, where workers keep running
when others fail.

The workers have a rendezvous of their own. That of the agents only counts restarts and determines how the job
ends. :mod:`.shared_budget` decides how its rounds affect the workers of this node.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from elasticrs._engine.nodes.protocol import messages
from elasticrs._engine.nodes.protocol.records import workers_of
from elasticrs._engine.nodes.protocol.round_outcome import nodes, restart_cost
from elasticrs._engine.nodes.transport.settings import Settings
from elasticrs._engine.supervise import state_machine as machine
from elasticrs._engine.supervise.decide import shared_budget as shared
from elasticrs._engine.supervise.decide.member_workers import among_workers, variables_of_members
from elasticrs._engine.supervise.decide.several_nodes import SeveralNodes
from elasticrs._engine.supervise.failed_attempt import facts, first_word, own_cause
from elasticrs._engine.workers.plan import NodeShare, Plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.job.restart_policy import Cause, Meetings
    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
    from elasticrs._engine.process.console import Console
    from elasticrs._engine.supervise.attempt import Attempt

_PHASES = {"running": machine.Phase.RUNNING, "stopping": machine.Phase.STOPPING}


class MemberNodes(SeveralNodes):
    """Makes the decisions of an agent whose workers keep running when other workers fail."""

    _keeps_workers = True

    def __init__(self, job: JobSpec, rendezvous: Rendezvous, console: Console) -> None:
        super().__init__(job, rendezvous, console)
        # Do not wait for late nodes: a node can join later without affecting running workers.
        waits = {"last_call_timeout": 0.0, "restart_call_timeout": 0.0}
        settings = Settings({**self._rendezvous.settings.fields(), **waits})
        # Allow two store clients per worker: one for its session and one for its round.
        self._rendezvous = self._rendezvous.replaced(settings=settings, clients=2 * job.nproc + 2)
        self._node = shared.NodeState(job.shutdown_timeout)
        self._members: dict[int, str] = {}
        self._why = ""
        self._is_own = False
        self._begun: messages.Start | None = None
        self._ended: messages.Outcome | None = None
        self._final_world_size: int | None = None
        self._unfinished: str | None = None

    def observe(self, attempt: Attempt) -> None:
        super().observe(attempt)
        self._follow_round()

    def step(self, event: machine.Event) -> list[machine.Action]:
        if isinstance(event, (machine.Begin, machine.SignalReceived)):
            return super().step(event)
        if isinstance(event, machine.WorkerExited):
            if event.exitcode == 0:
                return []
            return self._carry(shared.WorkerFailed(event.local_rank, event.met))
        if isinstance(event, machine.WorkerSwept):
            name = self._members.get(event.local_rank)
            if name is not None and not event.is_stuck:
                self._require_driver().worker_gone(name)
        if isinstance(event, machine.GroupEnded) and self._attempt is not None:
            self._final_world_size = self._known_final_world_size()
        return self._carry(event)

    def fenced(self) -> list[machine.Action]:
        found = super().fenced()
        # Kill the workers in any case: between rounds, the agents' rendezvous does not know that they run.
        return found + self._carry(shared.MustStop(machine.SIGKILL, is_fence=True))

    def _translate(self, actions: Iterable[messages.LoopAction]) -> list[machine.Action]:
        return self._carry(*self._events(actions))

    def _events(self, actions: Iterable[messages.LoopAction]) -> list[machine.Event]:
        found: list[machine.Event] = []
        signum = self.signum or machine.SIGTERM
        for action in actions:
            if isinstance(action, messages.Start):
                self._tell_round(action)
                self._look_for_unfinished_ranks(action)
                self._begun = action
                if self._node.group == "running":
                    self._follow_round()
                found.append(shared.RoundBegan(action.round, action.restarts))
            elif isinstance(action, messages.Stop):
                self._why, self.ends_elsewhere = action.why, action.asked
                if action.fenced:
                    self._console.say(f"{action.why}; killing the workers of this node")
                    found.append(shared.MustStop(machine.SIGKILL, is_fence=True))
                elif self._require_driver().is_leaving:
                    if self.signum is None and self._node.group == "running":
                        self._console.say(f"{action.why}; stopping the workers of this node")
                    found.append(shared.MustStop(signum))
                else:
                    found.append(shared.RoundEnded(() if action.planned else self._meetings()))
            elif isinstance(action, messages.Announce):
                self._console.say(action.text)
            elif isinstance(action, messages.Exit):
                self._ended = action.outcome
                self.ends_elsewhere |= action.outcome.kind == "aborted"
                self._tell_end(action.outcome)
                found.append(shared.JobEnded(signum))
        return found

    def _meetings(self) -> Meetings:
        page = None if self._attempt is None else self._attempt.plan.page
        return (None,) * self._job.nproc if page is None else page.meetings()

    def _known_final_world_size(self) -> int | None:
        page = None if self._attempt is None else self._attempt.plan.page
        return self._final_world_size if page is None else page.final_world_size()

    def _look_for_unfinished_ranks(self, begun: messages.Start) -> None:
        """Record that the job's results may be incomplete, if a node was lost after the training had ended.
        Its ranks may have had work left, such as saving, which no other workers repeat.
        """
        before, world_size = self._begun, self._known_final_world_size()
        if not begun.after_loss or before is None or world_size is None:
            return
        if world_size >= before.ranks.world_size:
            self._unfinished = (
                f"{begun.earlier} after the training had ended, but before its workers had exited; what they "
                "were saving may be incomplete: check the results, or start the job again"
            )

    def _follow_round(self) -> None:
        attempt, begun = self._attempt, self._begun
        if attempt is not None and begun is not None:
            attempt.agents_round = begun.round
            attempt.plan.ranks = begun.ranks.workers(NodeShare(self._job.role, self._job.nproc))
            attempt.plan.master_addr, attempt.plan.master_port = begun.master_addr, begun.master_port

    def _tell_round(self, begun: messages.Start) -> None:
        """Print why a new round has started, unless a line about a replaced worker already says so."""
        why, self._why, self._first_word = self._why, "", None
        is_own, self._is_own = self._is_own, False
        attempt = self._attempt
        if attempt is None or not why or self._node.group != "running":
            return
        is_charged = begun.restarts > attempt.restarts
        attempt.restarts, policy = begun.restarts, self._job.restart_settings
        if not is_own:
            cost = restart_cost(policy, begun.restarts, is_charged=is_charged)
            count = nodes(begun.ranks.group_world_size)
            self._console.say(f"{why}; the workers here continue, {count} ({cost})")

    def _tell_end(self, outcome: messages.Outcome) -> None:
        if self._node.group == "running" and self.signum is None:
            # A user may end the job while a round cannot begin, for example because a node has left.
            reason = outcome.message if outcome.kind == "aborted" else self._why
            why = f"{reason}: " if reason else ""
            self._console.say(f"{why}the job ends, stopping the workers of this node")

    def _carry(self, *events: machine.Event) -> list[machine.Action]:
        pending, found = deque(events), list[machine.Action]()
        while pending:
            self._node, effects = shared.step(self._node, pending.popleft())
            self._group_exists = self._node.group != "none"
            if not self.phase.is_terminal:
                self.phase = _PHASES.get(self._node.group, self.phase)
            for effect in effects:
                if isinstance(effect, machine.Action):
                    if isinstance(effect, machine.Start):
                        self._plan_group()
                    found.append(effect)
                elif isinstance(effect, shared.Finish):
                    found += self._finish()
                else:
                    pending.extend(self._events(self._tell_store(effect)))
        return found

    def _tell_store(self, effect: shared.Answer) -> list[messages.LoopAction]:
        event: messages.WorkersEvent
        match effect:
            case shared.Report():
                self._is_own = True
                event = messages.WorkerFailed(self._first_words(effect.local_rank).encoded())
            case shared.SayIdle():
                event = messages.GroupEnded(self._own_cause())
            case shared.SayEnded():
                event = messages.GroupEnded(self._own_cause(), effect.unfit)
            case _:
                event = effect
        return self._require_driver().tell(event)

    def _first_words(self, local_rank: int) -> Cause:
        attempt = self._attempt
        assert attempt is not None
        first = first_word(attempt, local_rank, self._place())
        # Include all fields about the failure in this report, because no later report about it follows.
        known = facts(attempt, local_rank, self._job.fatal_codes)
        self._first_word = first.replaced(round=None, **known)
        return self._first_word

    def _own_cause(self) -> messages.Cause | None:
        attempt = self._attempt
        if attempt is None or not attempt.failed_exits():
            return None
        codes = self._job.fatal_codes
        cause = own_cause(attempt, self._place(), self._first_word, fatal_exit_codes=codes)
        return None if cause is None else cause.replaced(round=None).encoded()

    def _plan_group(self) -> None:
        begun, driver, job = self._begun, self._require_driver(), self._job
        assert begun is not None
        ranks = begun.ranks.workers(NodeShare(job.role, job.nproc))
        plan = Plan(ranks, begun.master_addr, begun.master_port, use_agent_store=True)
        workers = among_workers(self._rendezvous, job)
        plan.variables = variables_of_members(workers, driver.store, driver.job_number)
        plan.members, plan.member_prefix = self._members, workers_of(driver.agent)
        self._set_plan(plan, partial(driver.store.open_shared_store, begun.round))

    def _finish(self) -> list[machine.Action]:
        ended = self._ended
        assert ended is not None
        if self._unfinished is not None and ended.kind == "succeeded":
            ended = messages.Outcome("failed", self._unfinished)
        return self._exit(ended)
