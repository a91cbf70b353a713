"""A node among several whose workers stay when others fail (``--on-failure replace``).

The workers are members of one rendezvous, the agents of another in the same store: that one counts restarts,
over all nodes, and says how the job ends. :mod:`elasticrs.agent.shared_budget` decides what its rounds mean
for the workers of this node; :mod:`elasticrs.agent.several_nodes` has the rest.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from elasticrs.agent import shared_budget as shared
from elasticrs.agent import state as machine
from elasticrs.agent.evidence import read_counters
from elasticrs.agent.member_workers import among_workers, variables_of_members
from elasticrs.agent.several_nodes import SeveralNodes
from elasticrs.plan import Plan
from elasticrs.ranks import NodeShare
from elasticrs.rendezvous.elastic import messages
from elasticrs.rendezvous.elastic.announcements import nodes
from elasticrs.rendezvous.elastic.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elasticrs.agent.cause import Cause
    from elasticrs.budget import Meetings
    from elasticrs.config import JobConfig
    from elasticrs.console import Console
    from elasticrs.rendezvous.elastic.meeting_point import Home
    from elasticrs.store import Store

_PHASES = {"running": machine.Phase.RUNNING, "stopping": machine.Phase.STOPPING}


class MemberNodes(SeveralNodes):
    """Decides for such a node.

    Args:
        job, console, planned, home: as for the base class.
    """

    _keeps_workers = True

    def __init__(
        self,
        job: JobConfig,
        console: Console,
        planned: Callable[[Plan, Callable[[], Store]], None] | None = None,
        home: Home | None = None,
    ) -> None:
        super().__init__(job, console, planned, home)
        # The agents wait for nobody: a node that comes, or comes back, changes nothing for the workers.
        waits = {"last_call_timeout": 0.0, "restart_call_timeout": 0.0}
        settings = Settings({**self._rendezvous.settings.fields(), **waits})
        # A worker has a session and a connection for its round.
        self._rendezvous = self._rendezvous.replaced(settings=settings, clients=2 * job.nproc + 2)
        self._node = shared.NodeState(job.shutdown_timeout)
        self._members: dict[int, str] = {}
        self._why = ""
        self._is_own = False
        self._begun: messages.Start | None = None
        self._ended: messages.Outcome | None = None

    # --- events of this node ---

    def step(self, event: machine.Event) -> list[machine.Action]:
        if isinstance(event, (machine.Begin, machine.SignalReceived)):
            return super().step(event)
        if isinstance(event, machine.WorkerExited):
            if event.exitcode == 0:
                return []
            return self._carry(shared.WorkerFailed(event.local_rank, event.met))
        if isinstance(event, machine.GroupEnded) and self._attempt is not None:
            self._attempt.oom_kills_after = read_counters(self._attempt.oom_kills)
        return self._carry(event)

    def fenced(self) -> list[machine.Action]:
        found = super().fenced()
        # The rendezvous may not know that there are workers: between two rounds.
        return found + self._carry(shared.MustStop(machine.SIGKILL, is_fence=True))

    # --- what the rendezvous says ---

    def _translate(self, actions: Iterable[messages.LoopAction]) -> list[machine.Action]:
        return self._carry(*self._events(actions))

    def _events(self, actions: Iterable[messages.LoopAction]) -> list[machine.Event]:
        found: list[machine.Event] = []
        signum = self.signum or machine.SIGTERM
        for action in actions:
            if isinstance(action, messages.Start):
                self._tell_round(action)
                self._begun = action
                found.append(shared.RoundBegan(action.round, action.restarts))
            elif isinstance(action, messages.Stop):
                self._why = action.why
                if action.fenced:
                    self._console.say(f"{action.why}; the workers of this node are killed")
                    found.append(shared.MustStop(machine.SIGKILL, is_fence=True))
                elif self._require_driver().is_leaving:
                    found.append(shared.MustStop(signum))
                else:
                    found.append(shared.RoundEnded(() if action.planned else self._meetings()))
            elif isinstance(action, messages.Announce):
                self._console.say(action.text)
            elif isinstance(action, messages.Exit):
                self._ended = action.outcome
                self._tell_end()
                found.append(shared.JobEnded(signum))
        return found

    def _meetings(self) -> Meetings:
        page = None if self._attempt is None else self._attempt.plan.page
        return (None,) * self._job.nproc if page is None else page.meetings()

    def _tell_round(self, begun: messages.Start) -> None:
        """Say what has happened elsewhere; of what fails here, the line of its replacement tells."""
        why, self._why, self._first_word = self._why, "", None
        is_own, self._is_own = self._is_own, False
        attempt = self._attempt
        if attempt is None or not why or self._node.group != "running":
            return
        is_charged = begun.restarts > attempt.restarts
        attempt.restarts, most = begun.restarts, self._job.max_restarts
        if not is_own:
            cost = f"restart {begun.restarts} of {most}"
            if not is_charged:
                cost = f"no restart charged, {begun.restarts} of {most} used"
            count = nodes(begun.ranks.group_world_size)
            self._console.say(f"{why}; the workers of this node go on, {count} ({cost})")

    def _tell_end(self) -> None:
        if self._node.group == "running" and self.signum is None:
            why = f"{self._why}: " if self._why else ""
            self._console.say(f"{why}the job ends; stopping the workers of this node")

    # --- what follows ---

    def _carry(self, *events: machine.Event) -> list[machine.Action]:
        """Decide on events, and on what the rendezvous has to say to that."""
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

    def _tell_store(
        self,
        effect: shared.Report | shared.SayIdle | shared.SayDone | shared.SayEnded | shared.SayNotStarted,
    ) -> list[messages.LoopAction]:
        driver = self._require_driver()
        match effect:
            case shared.Report():
                self._is_own = True
                return driver.tell(messages.WorkerFailed(self._first_words(effect.local_rank).encoded()))
            case shared.SayIdle():
                return driver.tell(messages.GroupEnded(self._own_cause()))
            case shared.SayDone():
                return driver.tell(messages.WorkersDone())
            case shared.SayEnded():
                return driver.tell(messages.GroupEnded(self._own_cause(), effect.unfit))
            case _:
                return driver.tell(messages.StartFailed(effect.message, effect.transient))

    def _first_words(self, local_rank: int) -> Cause:
        from elasticrs.agent.own_cause import first_word

        attempt = self._attempt
        assert attempt is not None
        self._first_word = first_word(attempt, local_rank, self._place(), self._clock()).replaced(round=None)
        return self._first_word

    def _own_cause(self) -> messages.Cause | None:
        attempt = self._attempt
        if attempt is None or not attempt.failed_exits():
            return None
        from elasticrs.agent.own_cause import own_cause

        cause = own_cause(attempt, self._place(), self._clock(), self._first_word)
        return None if cause is None else cause.replaced(round=None).encoded()

    def _plan_group(self) -> None:
        begun, driver, job = self._begun, self._require_driver(), self._job
        assert begun is not None
        ranks = begun.ranks.workers(NodeShare(job.role, job.nproc))
        self.plan = plan = Plan(ranks, begun.master_addr, begun.master_port, use_agent_store=True)
        workers = among_workers(self._rendezvous, job)
        plan.variables = variables_of_members(workers, driver.meeting_point, driver.job_number)
        plan.members = self._members
        if self._planned is not None:
            self._planned(plan, partial(driver.meeting_point.open_shared_store, begun.round))

    def _finish(self) -> list[machine.Action]:
        assert self._ended is not None
        return self._exit(self._ended)
