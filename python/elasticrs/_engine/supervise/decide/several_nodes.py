"""Decisions of one node's agent in a multi-node job: how to react to signals and failures, and how to exit.

The state machine in :mod:`.machine` decides when workers start and stop.
"""

from __future__ import annotations

import os
import signal
from functools import partial

from elasticrs._engine.gpus import MEMORY_LIMIT, are_gpus_visible
from elasticrs._engine.job import phrases
from elasticrs._engine.job.config import SAFETY_TICK
from elasticrs._engine.job.restart_policy import Cause, FailureHistory, Permanence, Verdict, is_suspect
from elasticrs._engine.nodes.driver import Driver
from elasticrs._engine.nodes.hosting import SystemResolver, decide_hosting
from elasticrs._engine.nodes.protocol import messages
from elasticrs._engine.nodes.protocol.records import silence_of, step_of
from elasticrs._engine.nodes.rendezvous_store import node_name
from elasticrs._engine.process.signals import how_to_hasten
from elasticrs._engine.supervise import state_machine as machine
from elasticrs._engine.supervise.decide.decisions import Decisions
from elasticrs._engine.supervise.failed_attempt import (
    Place,
    first_seen,
    first_word,
    no_program,
    own_cause,
)
from elasticrs._engine.workers.plan import NodeShare, Plan, agent_hosts_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from elasticrs import _core
    from elasticrs._engine.failures.failure import Clock
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.nodes.calls import Calls
    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
    from elasticrs._engine.process.background_call import BackgroundCall
    from elasticrs._engine.process.console import Console
    from elasticrs._engine.supervise.attempt import Attempt

_NOW = " (at once: elasticctl stop --now)"

_PHASES = {
    "succeeded": machine.Phase.SUCCEEDED,
    "spare": machine.Phase.SUCCEEDED,
    "left": machine.Phase.STOPPED,
    "aborted": machine.Phase.STOPPED,
}


class SeveralNodes(Decisions):
    """Makes the decisions of one node's agent. ``outcome`` is ``None`` while the job runs."""

    _keeps_workers = False

    def __init__(self, job: JobSpec, rendezvous: Rendezvous, console: Console) -> None:
        self._job = job
        self._rendezvous = rendezvous
        self._console = console
        self.outcome: messages.Outcome | None = None
        self._use_agent_store = rendezvous.backend != "static" and agent_hosts_store(os.environ)
        self._is_told = False
        self._driver: Driver | None = None
        self._attempt: Attempt | None = None
        self._first_failure: int | None = None
        self._first_word: Cause | None = None
        self._gathers_evidence = False
        self._group_exists = self._is_now = False
        self._found_unfit: str | None = None
        self._last_cause: Cause | None = None

    def open(self, supervisor: _core.Supervisor) -> None:
        """Look up the host names on another thread, because name servers may be slow."""
        super().open(supervisor)
        self._ask(partial(decide_hosting, self._rendezvous, SystemResolver()), self._begin)

    def _begin(self, names: BackgroundCall) -> list[machine.Action]:
        job = self._job
        self._driver = Driver(
            self._rendezvous,
            role=job.role,
            nproc=job.nproc,
            policy=job.restart_settings,
            fatal_exit_codes=phrases.ranges_text(sorted(job.fatal_codes)),
            supervisor=self._supervisor,
            use_agent_store=self._use_agent_store,
            kept=self.kept,
            found=names.take(),
            keeps_workers=self._keeps_workers,
            health_timeout=self._health_timeout(),
        )
        self._driver.serve = self.serve
        return self._translate(self._driver.begin())

    def observe(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._first_failure = self._first_word = None
        self._gathers_evidence = False
        self.failed_elsewhere = False

    def shared_cause(self) -> Mapping[str, Any] | None:
        head = None if self._driver is None else self._driver.last_head
        return None if head is None else head.cause

    def waits_for(self) -> str | None:
        return None if self._driver is None else self._driver.waits_for()

    def node_names(self, *, asks: bool = False) -> Sequence[str] | None:
        return None if self._driver is None else self._driver.node_names(asks=asks)

    @property
    def calls(self) -> Calls | None:
        return None if self._driver is None else self._driver.calls

    def claim_drain(self, *, stays_out: bool, take: Callable[[bool | None], bool]) -> None:
        self._require_driver().claim_drain(stays_out=stays_out, take=take)

    @property
    def others_running(self) -> int:
        return 0 if self._driver is None else self._driver.others_running

    @property
    def hosts_store(self) -> bool:
        return self._driver is not None and self._driver.store.hosts

    def read_history(self) -> FailureHistory:
        head = None if self._driver is None else self._driver.last_head
        if head is None:
            return FailureHistory()
        found, clock = head.failures, self._clock()
        times = [clock.to_monotonic(int(at * 1e9)) / 1e9 for at in found.charged_at]
        return found.replaced(charged_at=tuple(times))

    def seconds_left(self) -> float:
        return SAFETY_TICK if self._driver is None else self._driver.seconds_left(SAFETY_TICK)

    def look_around(self) -> list[machine.Action]:
        if self._driver is not None:
            return self._translate(self._driver.poll())
        if self._call is not None and not self._is_told:
            self._is_told = True
            name = self._rendezvous.host if self._rendezvous.etcd is None else node_name()
            self._console.say(f"waiting for DNS to resolve {name}")
        return []

    def fd_ready(self, fd: int) -> list[machine.Action] | None:
        actions = super().fd_ready(fd)
        if actions is not None:
            return actions
        if self._driver is None or fd not in self._driver.fds:
            return None
        return self._translate(self._driver.poll())

    def fenced(self) -> list[machine.Action]:
        if self._driver is None:
            return []
        # Events of the store's client may tell why the connection was lost, so handle them first.
        found = self._translate(self._driver.poll())
        if not self._group_exists:
            # Keep the connection to the store, because the expired lease belonged to an earlier connection.
            return found
        return found + self._translate(self._driver.lose("no keep-alive reached the store in time"))

    def release_plan(self) -> None:
        """Drop the attempt's plan, but leave its port open: the rendezvous closes it after the round."""
        self.plan = None

    def close(self) -> None:
        super().close()
        if self._driver is not None:
            self._driver.close()

    def step(self, event: machine.Event) -> list[machine.Action]:
        if self.phase.is_terminal:
            return []
        if isinstance(event, machine.SignalReceived):
            return self._on_signal(event)
        if isinstance(event, machine.RestartRequested):
            return self._tell(messages.AskForRound(event.reason))
        if isinstance(event, machine.Begin):
            self.phase = machine.Phase.RENDEZVOUS
            # Continue once the host names have been resolved.
            return []
        if isinstance(event, machine.Started):
            self.phase = machine.Phase.RUNNING
            return []
        if isinstance(event, machine.StartFailed):
            self._group_exists = False
            self._console.group_rank = None
            why = event.message.removeprefix(f"{phrases.NOT_STARTED}: ")
            if event.has_no_program:
                # The restart policy can exclude this node if the program starts on all other nodes.
                self._last_cause = cause = no_program(why, self._place())
                return self._over(messages.GroupEnded(cause.encoded()))
            return self._over(messages.StartFailed(why, event.transient))
        if isinstance(event, machine.FailureSeen):
            # Only note the worker now: a later event reports how it exited.
            self._first_failure = event.local_rank
            return []
        if isinstance(event, machine.HangSeen):
            return self._on_hang(event)
        if isinstance(event, machine.WorkerExited):
            return self._on_exit(event)
        if isinstance(event, machine.GroupEnded):
            return self._on_group_ended(event)
        return []

    def _on_signal(self, event: machine.SignalReceived) -> list[machine.Action]:
        signum, ends_job = event.signum, event.ends_job
        if self._driver is None:
            self.phase, self.signum = machine.Phase.STOPPED, signum
            return [machine.Exit(1)]
        was_leaving = self.leaves
        if self.signum is not None and not (was_leaving and ends_job):
            # A second stop request kills the workers at once.
            return self._kill()
        self.signum, self._is_now, self.leaves = signum, event.now, False
        name = phrases.signal_name(signum)
        reason, ends_the_job = name, True
        if ends_job:
            what, reason = "the job ends", f"elasticctl {event.order} on node {node_name()}"
        elif ends_job is None and self._rendezvous.settings.drain == "job":
            what, reason = "the job ends (drain=job)", f"{name} to node {node_name()} (drain=job)"
        elif self.hosts_store:
            what = "the job ends with its store"
            reason = f"{name} to node {node_name()}, which hosts the rendezvous store"
        else:
            what, ends_the_job, self.leaves = "this node leaves the job", False, True
            reason = f"elasticctl {event.order}" if event.order else name
        if ends_job is None and self.ends_elsewhere:
            # The time until SIGKILL has begun with the stop of the other node.
            what = f"the job is ending already{how_to_hasten(signum)}"
        elif self._group_exists and (event.now or not was_leaving):
            again = how_to_hasten(signum) if ends_job is None else _NOW if ends_job else ""
            first = "" if ends_job is None else f"{name} to the workers, "
            grace = f"{first}SIGKILL in {self._job.shutdown_timeout:g} s{again}"
            what += f"; {'SIGKILL to the workers' if event.now else grace}"
        source = f"{name} received" if ends_job is None else "elasticctl"
        self._console.say(f"{source}: {what}")
        told = self._tell(messages.Leave(reason, close=ends_the_job))
        return told + self._kill(is_announced=True) if event.now and not self.phase.is_terminal else told

    def _kill(self, *, is_announced: bool = False) -> list[machine.Action]:
        """Kill the workers of this node. Stop waiting for other nodes and for the store."""
        kill: list[machine.Action] = [machine.Stop(machine.SIGKILL, 0.0, is_announced=is_announced)]
        return (kill if self._group_exists else []) + self._translate(self._require_driver().hasten())

    def _on_hang(self, event: machine.HangSeen) -> list[machine.Action]:
        """Report the hang to the other nodes before the hung worker is killed, so that they can collect
        evidence. Its death makes the workers that wait for it fail, and failed workers cannot write stacks or
        flight records (files in which torch records collectives).
        """
        self._gathers_evidence = True
        attempt = self._attempt
        if attempt is None or self._first_word is not None:
            return []
        self._first_word = first_word(attempt, event.local_rank, self._place())
        return self._tell(messages.WorkerFailed(self._first_word.encoded()))

    def _on_exit(self, event: machine.WorkerExited) -> list[machine.Action]:
        attempt = self._attempt
        if attempt is None or event.local_rank != self._first_failure or self._first_word is not None:
            return []
        self._first_word = first_word(attempt, first_seen(attempt), self._place())
        return self._tell(messages.WorkerFailed(self._first_word.encoded()))

    def _on_group_ended(self, event: machine.GroupEnded) -> list[machine.Action]:
        self._group_exists = False
        self._console.group_rank = None
        attempt = self._attempt
        if attempt is None:
            return []
        if event.outcome == "succeeded":
            return self._over(messages.WorkersDone())
        # If a worker hung in the kernel, `why_stuck` already reports it.
        is_failure = self.phase is not machine.Phase.STOPPING and event.unfit is None
        self._found_unfit = event.found_unfit
        if is_failure or self._first_failure is not None or attempt.expired:
            codes = self._job.fatal_codes
            cause = own_cause(attempt, self._place(), self._first_word, fatal_exit_codes=codes)
        else:
            cause = None
        self._last_cause = cause
        evidence = None
        if self._gathers_evidence or attempt.files.run(attempt.has_flight_records, False):
            evidence = self._evidence(attempt)
        told = None if cause is None else cause.encoded()
        return self._over(messages.GroupEnded(told, event.why_stuck, evidence, event.found_unfit))

    def _evidence(self, attempt: Attempt) -> bytes | None:
        try:
            from elasticrs._engine.supervise.hang_diagnosis import node_evidence

            return attempt.files.run(partial(node_evidence, attempt, is_hang=self._gathers_evidence), None)
        # An error in the diagnosis code must not end the job without a report.
        except Exception as error:
            from elasticrs._engine.hangs.diagnose import failed

            self._console.say(failed(error).summary)
            return None

    def _health_timeout(self) -> float:
        """Return how many seconds the node check and the wait for free device memory take at most."""
        check = self._job.node_check_timeout if self._job.node_check else 0.0
        return check + (MEMORY_LIMIT if are_gpus_visible(os.environ) else 0.0)

    def _place(self) -> Place:
        rank = -1 if self._attempt is None else self._attempt.plan.ranks[0].group_rank
        return Place(node_name(), node_name(), rank, self._clock())

    def _clock(self) -> Clock:
        return self._require_driver().store.clock

    def _require_driver(self) -> Driver:
        if self._driver is None:
            raise RuntimeError("no supervisor yet")
        return self._driver

    def _tell(self, *events: messages.Event) -> list[machine.Action]:
        return self._translate(self._require_driver().tell(*events))

    def _over(self, event: messages.Event) -> list[machine.Action]:
        return self._translate(self._require_driver().group_over(event))

    def _translate(self, actions: Iterable[messages.LoopAction]) -> list[machine.Action]:
        found: list[machine.Action] = []
        for action in actions:
            if isinstance(action, messages.Start):
                found += self._start(action)
            elif isinstance(action, messages.Stop):
                found += self._stop(action)
            elif isinstance(action, messages.Announce):
                self._console.say(action.text)
            elif isinstance(action, messages.Exit):
                found += self._exit(action.outcome)
        return found

    def _start(self, action: messages.Start) -> list[machine.Action]:
        if self._attempt is not None and self._attempt.round == action.round - 1:
            self._attempt.cause, self._attempt.delay = action.earlier, action.delay
        driver = self._require_driver()
        trouble = driver.open_store() if action.serves_store else None
        if trouble is not None:
            return self._over(messages.StartFailed(trouble))
        ranks = action.ranks.workers(NodeShare(self._job.role, self._job.nproc))
        plan = Plan(ranks, action.master_addr, action.master_port, use_agent_store=self._use_agent_store)
        self._set_plan(plan, partial(driver.store.open_shared_store, action.round))
        self.begin_exchange = partial(driver.begin_exchange, action)
        self.phase, self._group_exists = machine.Phase.STARTING, True
        self._console.group_rank = action.ranks.group_rank
        return [machine.Start(action.round, action.restarts)]

    def _stop(self, action: messages.Stop) -> list[machine.Action]:
        self.phase = machine.Phase.STOPPING
        self.failed_elsewhere, self.ends_elsewhere = action.after_failure, action.asked
        if action.fenced:
            then = "" if self._require_driver().is_leaving else ", then joining again"
            self._console.say(f"{action.why}; killing the workers{then}")
            return [machine.Stop(machine.SIGKILL, 0.0, is_announced=True)]
        grace, is_planned = self._job.shutdown_timeout, action.planned or action.asked
        if self._is_now:
            return [machine.Stop(machine.SIGKILL, 0.0, is_announced=True)]
        signum, hung = self.signum, None
        if signum is None:
            signum = signal.SIGTERM
            self._console.say(f"{action.why}; stopping round {action.round}")
            if action.hung is not None:
                hung = _hung_elsewhere(action.hung)
                self._gathers_evidence = True
        how = {"is_planned": is_planned, "node_leaves": action.node_leaves}
        return [machine.Stop(signum, grace, is_announced=True, hung=hung, **how)]

    def _exit(self, outcome: messages.Outcome) -> list[machine.Action]:
        self.clock = self._clock()
        self.outcome = outcome
        self.has_taken_part = outcome.kind != "spare"
        if outcome.cause is not None:
            self.first_cause = Cause.decoded(outcome.cause)
        self.phase = _PHASES.get(outcome.kind, machine.Phase.FAILED)
        if outcome.kind == "spare" and (outcome.has_failed or self._rendezvous.max_nodes == 1):
            # This job may have joined the rendezvous of another job with the same command line, and the
            # caller would assume that this job's own workers have succeeded.
            self.phase = machine.Phase.FAILED
        code = 0 if self.phase is machine.Phase.SUCCEEDED else 1
        if code == 0 and self.signum is None:
            if outcome.message is not None:
                self._console.say(outcome.message)
            return [machine.Exit(0)]
        if self.signum is not None:
            self.phase = machine.Phase.STOPPED
            return [machine.Exit(1)]
        # Report an unfit node even if it was not excluded, because it should not run the next job either.
        verdict = verdict_of(
            outcome, is_unfit=self._found_unfit is not None, has_failed_alone=self._has_failed_alone
        )
        is_outside = outcome.is_explained or outcome.kind not in {"failed", "stuck", "excluded"}
        return [machine.ReportFailure(outcome.message, verdict, is_outside=is_outside), machine.Exit(code)]

    @property
    def _has_failed_alone(self) -> bool:
        return has_failed_alone(self._last_cause, self.read_history(), node_name())


def has_failed_alone(cause: Cause | None, history: FailureHistory, node: str) -> bool:
    """Return true if this node was repeatedly the only node that could not start the program."""
    is_start_error = cause is not None and cause.permanence == Permanence.START_ERROR
    return is_start_error and is_suspect(history, node)


def verdict_of(outcome: messages.Outcome, *, is_unfit: bool, has_failed_alone: bool) -> Verdict:
    # Do not blame this node for a permanent failure: the program is at fault.
    if is_unfit or outcome.kind in ("stuck", "excluded") or (has_failed_alone and not outcome.is_permanent):
        return Verdict.UNFIT
    return Verdict.PERMANENT if outcome.is_permanent else Verdict.FAILED


def _hung_elsewhere(cause: Mapping[str, Any]) -> machine.HungElsewhere:
    step, frame = step_of(cause), cause.get("frame")
    return machine.HungElsewhere(
        silence_of(cause) or 0.0,
        step if step is not None and step >= 0 else None,
        frame if isinstance(frame, str) else None,
    )
