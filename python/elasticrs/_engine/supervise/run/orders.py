"""Carries out the orders that the command ``elasticctl`` sends to a job's agent over the agent's Unix socket.

An order is a JSON object, such as ``{"do": "stop", "now": true}``. The agent answers with one or more lines,
each a JSON object. The last one has the exit code for ``elasticctl`` (``code``) and a text for the user
(``message``).
"""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from typing import TYPE_CHECKING

from elasticrs._engine.job import phrases
from elasticrs._engine.process.background_call import FileAccess
from elasticrs._engine.supervise.attempts import state_machine as machine
from elasticrs._engine.supervise.run.worker_states import can_take

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol, TypeAlias

    from elasticrs import _core
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.supervise.attempts.attempt import Attempt
    from elasticrs._engine.supervise.decide.decisions import Decisions
    from elasticrs._engine.supervise.run.agreed_step import Delivery, Tell
    from elasticrs._engine.supervise.run.checkpoint_requests import CheckpointRequests
    from elasticrs._engine.supervise.run.tracker import AttemptTracker

    class Agent(Protocol):
        """The methods of the job's agent that orders use. They do not block."""

        checkpoints: CheckpointRequests | None

        def ask_to_stop(self, event: machine.SignalReceived, tell: Tell | None = None) -> None: ...
        def pass_on(self, signum: int, tell: Tell | None = None) -> None: ...
        def holds(self, signum: int) -> bool: ...
        def ask_for_checkpoint(self, checkpoints: CheckpointRequests) -> None: ...

    Answer: TypeAlias = Callable[[dict[str, Any]], None]
    """Function that sends a line to ``elasticctl``. The last line has a ``code``. Any thread can call it."""

DONE, FAILED, USAGE, NOT_AGREED, NO_JOB, REFUSED = range(6)
"""Exit codes of ``elasticctl``. The documentation explains them."""

STACKS_LIMIT = 1.0
"""Seconds within which a running worker has to tell its Python stack. One that does not runs C code."""

_WAYS = (
    "a handler for SIGUSR1 in the script, Lightning's SLURMEnvironment(requeue_signal=SIGUSR1), or"
    " elasticrs.train with --on-failure replace"
)


class Refused(Exception):  # noqa: N818 -- it is an answer
    """Raised if an order cannot be carried out now. The text tells the user why, and what to do."""


class Orders:
    """Carries out orders of ``elasticctl`` to this agent. ``say`` prints a line on the agent's console."""

    def __init__(
        self,
        agent: Agent,
        job: JobSpec,
        tracker: AttemptTracker,
        decisions: Decisions,
        say: Callable[[str], None],
    ) -> None:
        self._agent, self._job, self._tracker = agent, job, tracker
        self._decisions, self._say = decisions, say
        self._actions: dict[str, Callable[[dict[str, Any], Answer], None]] = {
            "stop": self._stop,
            "restart": self._restart,
            "drain": self._drain,
            "checkpoint": self._checkpoint,
            "stacks": self._stacks,
        }

    def take(self, server: _core.HealthServer) -> None:
        """Carry out the orders that ``elasticctl`` has sent to the server of the agent's Unix socket."""
        for number, uid, pid, text in server.take_orders():
            self._carry_out(text, uid, pid, partial(_reply, server, number))

    def _carry_out(self, text: str, uid: int, pid: int | None, answer: Answer) -> None:
        try:
            order = json.loads(text)
            what = order["do"]
        except (ValueError, TypeError, LookupError, RecursionError):
            answer({"code": USAGE, "message": "the order is no JSON object with a field 'do'"})
            return
        action = self._actions.get(what) if type(what) is str else None
        if action is None:
            said = f"this agent does not know the order {phrases.printable(str(what)[:40])!r}"
            answer({"code": USAGE, "message": f"{said}; it may be older than elasticctl"})
            return
        if what != "stacks":  # An order for stacks changes nothing, so do not tell of it.
            words = f"{what} --now" if order.get("now") is True else what
            who = f"user {uid}" if pid is None else f"user {uid}, pid {pid}"
            self._say(f"elasticctl ({who}): {words}")
            self._tracker.observers.ordered(words, uid, pid)
        try:
            action(order, answer)
        except Refused as reason:
            self._say(f"elasticctl: refused, because {reason}")
            answer({"code": REFUSED, "message": str(reason)})

    def _running_attempt(self) -> Attempt:
        attempt = self._tracker.attempt
        if attempt is None or self._decisions.phase is not machine.Phase.RUNNING:
            raise Refused("no workers are running now; try again when elasticctl status says so")
        return attempt

    def _grace(self) -> str:
        return f"SIGKILL in {self._job.shutdown_timeout:g} s"

    def _stop(self, order: dict[str, Any], answer: Answer) -> None:
        is_now, is_stopping = order.get("now") is True, self._decisions.signum is not None
        if is_stopping and not is_now:
            raise Refused("the job is being stopped already; --now kills the workers at once")
        what = "the job" if self._decisions.can_end_job else "this node's part of the job"
        how = "its workers are being killed" if is_now else f"SIGTERM to its workers, {self._grace()}"
        told = {"message": f"stopping {what}: {how}"}
        event = machine.SignalReceived(signal.SIGTERM, ends_job=True)
        if not is_now and self._decisions.phase is machine.Phase.RUNNING:
            answer(told)
            self._agent.ask_to_stop(event, partial(_tell_delivery, answer, self._count()))
            return
        for _ in range(2 if is_now and not is_stopping else 1):
            self._agent.ask_to_stop(event)
        answer({"code": DONE, **told})

    def _count(self) -> int:
        return len(self._running_attempt().running())

    def _restart(self, _order: dict[str, Any], answer: Answer) -> None:
        if self._job.on_failure == "replace":
            raise Refused("workers are replaced one by one (--on-failure replace)")
        if self._job.make_handler is not None:
            raise Refused("a rendezvous handler of another package decides when attempts begin")
        attempt, node = self._running_attempt(), os.uname().nodename
        self._tracker.events.append(machine.RestartRequested(f"elasticctl restart on node {node}"))
        workers = f"{attempt.world_size} workers" if attempt.world_size != 1 else "only worker"
        how = f"SIGTERM to its {workers}, {self._grace()}; no restart is charged"
        answer({"code": DONE, "message": f"restarting the job: {how}"})

    def _drain(self, order: dict[str, Any], answer: Answer) -> None:
        node, own, rendezvous = order.get("node"), os.uname().nodename, self._job.rendezvous
        if node != own:
            raise Refused(f"this agent runs on {own}: run the command on the node that is to leave")
        if rendezvous is None:
            raise Refused("this job has no other node that could continue; use elasticctl stop")
        if self._decisions.hosts_store:
            raise Refused(f"{own} hosts the store in which the nodes meet, so the job would end with it")
        left = self._running_attempt().plan.ranks[0].group_world_size - 1
        if left < rendezvous.min_nodes:
            are_left = f"{left} node{'s' if left != 1 else ''} would be left"
            raise Refused(f"{are_left}, and the job needs {rendezvous.min_nodes} (--nnodes)")
        answer({"message": f"{own} leaves the job: SIGTERM to the workers; {_who_continues(left)}"})
        event = machine.SignalReceived(signal.SIGTERM, ends_job=False)
        self._agent.ask_to_stop(event, partial(_tell_delivery, answer, self._count()))

    def _checkpoint(self, order: dict[str, Any], answer: Answer) -> None:
        attempt = self._running_attempt()
        if self._agent.checkpoints is not None:
            self._agent.ask_for_checkpoint(self._agent.checkpoints)
            told = "all workers save at the end of the same step; the console of the job tells the result"
            answer({"code": DONE, "message": told})
            return
        nodes = attempt.plan.ranks[0].group_world_size
        if nodes > 1 and order.get("on_all_nodes") is not True:
            raise Refused(
                f"the job has {nodes} nodes, and an agent asks the ranks of its own: run the command on all"
                " nodes at the same time, with --on-all-nodes"
            )
        ranks = attempt.global_ranks()
        pids = attempt.running()
        deaf = sorted(ranks[rank] for rank in pids if can_take(pids[rank], signal.SIGUSR1) is False)
        if deaf:
            who = phrases.ranks_text(deaf, 8)
            raise Refused(f"SIGUSR1 would kill {who}. A checkpoint on request needs one of these: {_WAYS}")
        if self._agent.holds(signal.SIGUSR1):
            raise Refused("SIGUSR1 is already being held back until all ranks have made the same step")
        self._agent.pass_on(signal.SIGUSR1, partial(_tell_delivery, answer, self._count()))

    def _stacks(self, _order: dict[str, Any], answer: Answer) -> None:
        # Read the stacks on another thread, because that waits for the workers and reads files.
        FileAccess().begin(partial(_tell_stacks, self._running_attempt(), answer))


def _reply(server: _core.HealthServer, number: int, fields: dict[str, Any]) -> None:
    server.reply(number, json.dumps(fields), is_last="code" in fields)


def _who_continues(nodes: int) -> str:
    return f"{nodes} nodes continue" if nodes != 1 else "1 node continues"


def _tell_delivery(answer: Answer, ranks: int, sent: Delivery) -> None:
    to = f"{phrases.signal_name(sent.signum)} sent to {ranks} rank{'s' if ranks != 1 else ''}"
    if sent.step is not None:
        waited = phrases.milliseconds(round(sent.waited * 1e9))
        after = f"after optimizer step {sent.step:,} of this attempt"
        answer({"code": DONE, "step": sent.step, "message": f"{to} {after}, held {waited}"})
    elif sent.why:
        answer({"code": NOT_AGREED, "message": f"{to} without an agreed step: {sent.why}"})
    else:
        answer({"code": DONE, "message": f"{to} at once: none that trains with torch.optim handles it"})


def _tell_stacks(attempt: Attempt, answer: Answer) -> None:
    try:
        from elasticrs._engine.supervise.failures.hang_diagnosis import where_running

        found = {"code": DONE, **where_running(attempt, STACKS_LIMIT)}
    # An error in the diagnosis code must not leave the user without an answer.
    except Exception as error:
        found = {"code": FAILED, "message": f"the stacks could not be read: {error!r}"}
    answer(found)
