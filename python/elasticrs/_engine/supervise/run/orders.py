"""Carries out the orders that the command ``elasticctl`` sends to a job's agent over the agent's Unix socket.

An order is a JSON object, such as ``{"do": "stop", "now": true}``. The agent answers with one or more lines,
each a JSON object. The last one has the exit code for ``elasticctl`` (``code``) and a text for the user
(``message``).
"""

from __future__ import annotations

import _thread
import json
import os
import signal
import time
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from elasticrs._engine.job import phrases
from elasticrs._engine.job.value import Value
from elasticrs._engine.nodes.calls import MAX_ANSWER
from elasticrs._engine.nodes.protocol.records import (
    COUNT,
    FLAG,
    INT,
    NAME,
    SPAN,
    TEXT,
    WHOLE,
    list_of,
    one_of,
    optional,
)
from elasticrs._engine.process.background_call import FileAccess
from elasticrs._engine.supervise import state_machine as machine
from elasticrs._engine.supervise.run.agreed_step import LONGEST_HOLD, SAVE_HOLD, Delivery
from elasticrs._engine.supervise.run.worker_states import can_take

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Protocol, TypeAlias

    from elasticrs import _core
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.nodes.calls import RoundPlace, Take
    from elasticrs._engine.nodes.protocol.records import Check
    from elasticrs._engine.supervise.attempt import Attempt
    from elasticrs._engine.supervise.decide.decisions import Decisions
    from elasticrs._engine.supervise.run.agreed_step import Tell
    from elasticrs._engine.supervise.run.tracker import AttemptTracker
    from elasticrs._engine.workers.node_page import CheckpointRequests

    class Agent(Protocol):
        """The methods of the job's agent that orders use. They do not block."""

        checkpoints: CheckpointRequests | None

        def ask_to_stop(self, event: machine.SignalReceived, tell: Tell | None = None) -> None: ...
        def pass_on(self, signum: int, tell: Tell | None = None) -> None: ...
        def holds(self, signum: int) -> bool: ...
        def ask_for_checkpoint(self, checkpoints: CheckpointRequests) -> None: ...

    Answer: TypeAlias = Callable[[dict[str, Any]], None]
    """Function that sends a line to ``elasticctl``. The last line has a ``code``. Any thread can call it."""
    Action: TypeAlias = Callable[[dict[str, Any], Answer], None]

DONE, FAILED, USAGE, NOT_AGREED, NO_JOB, REFUSED = range(6)
"""Exit codes of ``elasticctl``. The documentation explains them."""

STACKS_LIMIT = 1.0
"""Seconds within which a running worker has to tell its Python stack. One that does not runs C code."""

NOW_LIMIT = 1.0
"""Maximum seconds that ``elasticctl stop --now`` waits for other agents before it kills the workers here."""

CALL_LIMIT = 3.0
"""Maximum seconds to wait for the other nodes' agents to answer a request that they can answer at once."""

OTHERS_PERIOD = 2.0
"""Minimum seconds between two requests to the other nodes' agents for the states of their ranks."""

LOOK_PERIOD = 10.0
"""Minimum seconds between two searches for late ranks, because each pauses the workers for some 0.03 s."""

LOOK_LIMIT = 1.0
"""Maximum seconds that a search for late ranks waits for the workers."""

MOST_ASKED = 1000
"""Maximum number of other nodes whose agents are asked for their ranks' states. With more, none is asked."""

DRAIN_LIMIT = LONGEST_HOLD + CALL_LIMIT
"""Maximum seconds to wait for the agent of a drained node, which may first hold its workers' signal back."""

_QUESTIONS = frozenset(("stacks", "others", "ranks", "who", "can checkpoint"))
"""Orders that only ask an agent for something, so that its console does not mention them."""

_WAYS = (
    "a handler for SIGUSR1 in the script, Lightning's SLURMEnvironment(requeue_signal=SIGUSR1), or"
    " elasticrs.train with --on-failure replace"
)


_NO_ROUND = (
    "the connection to the store in which the nodes meet was lost, or the nodes are about to meet again; try"
    " again when they have met"
)


class Refused(Exception):  # noqa: N818 -- it is an answer
    """Raised if the agent cannot carry out an order of ``elasticctl`` now. The text tells the user why.

    Args:
        code: exit code of ``elasticctl``.
        advice: what the user of ``elasticctl`` can do about it; the agent's console does not show it.
    """

    def __init__(self, text: str, code: int = REFUSED, advice: str = "") -> None:
        super().__init__(text)
        self.code, self.advice = code, advice


class Orders:
    """Carries out orders that ``elasticctl`` sends to this agent, and this node's part of orders that it
    sends to agents of other nodes (:mod:`.calls`). ``say`` prints a line on this agent's console.
    """

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
        self._node = os.uname().nodename
        self._known = _Known(0, float("-inf"), [])
        self._waiting: list[Callable[[], None]] | None = None
        self._looked: tuple[Attempt | None, float] = None, float("-inf")
        # Functions to call when the search for late ranks that is in progress ends; `None` if none is in
        # progress.
        self._after_look: list[Callable[[], None]] | None = None
        self._look_lock = _thread.allocate_lock()
        self._actions: dict[str, Action] = {
            "stop": self._stop,
            "restart": self._restart,
            "drain": self._drain,
            "checkpoint": self._checkpoint,
            "stacks": self._stacks,
            "others": self._tell_others,
        }
        self._parts: dict[str, Action] = {
            "who": self._tell_who,
            "ranks": self._tell_ranks,
            "stacks": self._tell_own_stacks,
            "stop": self._stop,
            "drain": self._drain_own,
            "can checkpoint": self._tell_if_it_can_save,
            "checkpoint": self._save,
        }

    def take(self, server: _core.HealthServer) -> None:
        """Carry out the orders that ``elasticctl`` has sent to the server of the agent's Unix socket."""
        for number, uid, pid, text in server.take_orders():
            answer = partial(_reply, server, number)
            try:
                order = json.loads(text)
                what = order["do"]
            except (ValueError, TypeError, LookupError, RecursionError):
                answer({"code": USAGE, "message": "the order is no JSON object with a field 'do'"})
                continue
            own = {**order, "user": uid, "pid": pid, "sender": None}
            self._carry_out(self._actions, what, own, answer)

    def take_call(self, order: dict[str, Any], answer: Answer) -> None:
        """Carry out this node's part of an order that ``elasticctl`` has sent to another node's agent."""
        self._carry_out(self._parts, order.get("do"), order, answer)

    def _carry_out(
        self, actions: dict[str, Action], what: object, order: dict[str, Any], answer: Answer
    ) -> None:
        action = actions.get(what) if type(what) is str else None
        if action is None:
            said = f"this agent does not know the order {phrases.printable(str(what)[:40])!r}"
            answer({"code": USAGE, "message": f"{said}; it may be older than elasticctl"})
            return
        if what not in _QUESTIONS:
            words = f"{what} --now" if order.get("now") is True else str(what)
            uid, pid, sender = order.get("user"), order.get("pid"), order.get("sender")
            who = f"user {uid}" if pid is None else f"user {uid}, pid {pid}"
            who += "" if sender is None else f" on node {phrases.printable(str(sender))}"
            self._say(f"elasticctl ({who}): {words}")
            self._tracker.observers.ordered(words, uid, pid, sender)
        self._try(partial(action, order, answer), answer)

    def _try(self, act: Callable[[], None], answer: Answer) -> bool:
        """Call ``act`` to carry out an order, and return true. If it refuses or fails, tell the console and
        ``elasticctl`` why, and return false.
        """
        try:
            act()
        except Refused as reason:
            self._say(f"elasticctl: refused, because {reason}")
            answer({"code": reason.code, "message": f"{reason}{reason.advice}"})
        # An error in the code that carries out an order must not end the job.
        except Exception as error:
            self._say(f"elasticctl: the order has failed: {error!r}")
            answer({"code": FAILED, "message": f"the agent could not carry out the order: {error!r}"})
        else:
            return True
        return False

    def _ask_others(
        self, order: dict[str, Any], what: str, limit: float, take: Take, ranks: Sequence[int] | None = None
    ) -> None:
        """Ask the agents of other nodes to do ``what``, their part of an order of ``elasticctl``. Then call
        ``take`` with their answers. ``ranks`` are the group ranks of these nodes, by default of all others.
        """
        calls = self._decisions.calls
        if calls is None:
            take({})
            return
        request = {name: order.get(name) for name in ("user", "pid", "now", "stay_out")}
        calls.ask({**request, "do": what}, calls.others() if ranks is None else ranks, limit, take)

    def _running_attempt(self) -> Attempt:
        attempt = self._tracker.attempt
        if attempt is None or self._decisions.phase is not machine.Phase.RUNNING:
            if self._decisions.is_ending:
                raise Refused("the job is being stopped")
            raise Refused("no workers are running now; try again when elasticctl status says so")
        return attempt

    def _count(self) -> int:
        return len(self._running_attempt().running())

    def _grace(self) -> str:
        return f"SIGKILL in {self._job.shutdown_timeout:g} s"

    def _tell_who(self, _order: dict[str, Any], answer: Answer) -> None:
        answer({"code": DONE, "name": self._node})

    def _stop(self, order: dict[str, Any], answer: Answer) -> None:
        is_now = order.get("now") is True
        if not is_now and not self._decisions.can_be_stopped:
            raise Refused("the job is being stopped already; --now kills the workers at once")
        what = "the job" if self._decisions.can_end_job else "this node's part of the job"
        how = "its workers are being killed" if is_now else f"SIGTERM to its workers, {self._grace()}"
        if others := self._decisions.others_running:
            what += f", which runs on {phrases.counted(others, 'node')} without this one"
        told = {"message": f"stopping {what}: {how}"}
        name = "stop --now" if is_now else "stop"
        event = machine.SignalReceived(signal.SIGTERM, ends_job=True, now=is_now, order=name)
        # Workers that are replaced one by one agree on a step themselves. Do not delay their signal.
        may_be_held = self._agent.checkpoints is None and self._decisions.phase is machine.Phase.RUNNING
        if not is_now and may_be_held:
            answer(told)
            self._agent.ask_to_stop(event, partial(_tell_delivery, answer, self._count()))
            return

        def carry_out(_answers: object) -> None:
            self._agent.ask_to_stop(event)
            answer({"code": DONE, **told})

        if is_now and order.get("sender") is None:
            # First tell the other agents, because the end of this agent would withdraw its calls.
            self._ask_others(order, "stop", NOW_LIMIT, carry_out)
        else:
            carry_out({})

    def _restart(self, _order: dict[str, Any], answer: Answer) -> None:
        if self._job.on_failure == "replace":
            raise Refused("workers are replaced one by one (--on-failure replace)")
        if self._job.make_handler is not None:
            raise Refused("a rendezvous handler of another package decides when attempts begin")
        attempt = self._running_attempt()
        self._tracker.events.append(machine.RestartRequested(f"elasticctl restart on node {self._node}"))
        workers = f"{attempt.world_size} workers" if attempt.world_size != 1 else "only worker"
        how = f"SIGTERM to its {workers}, {self._grace()}; no restart is charged"
        answer({"code": DONE, "message": f"restarting the job: {how}"})

    # --- ranks of other nodes ---

    def others(self) -> list[dict[str, Any]]:
        """Return the last answers of other nodes' agents about their ranks in this round, with their age."""
        known, age = self._known, time.monotonic() - self._known.at
        return [{**each, "age_seconds": age} for each in known.nodes] if self._is_of_now(known) else []

    def _is_of_now(self, known: _Known) -> bool:
        attempt = self._tracker.attempt
        return attempt is not None and attempt.agents_round == known.round

    def ask_others(self, take: Callable[[], None] = lambda: None) -> None:
        """Ask the other nodes' agents for the states of their ranks, unless the last answers are less than
        two seconds old. Then search for late ranks of this node. Finally call ``take``: :meth:`others` and
        ``Attempt.look`` are up to date then. ``take`` may be called before this method returns, or on
        another thread.
        """
        take = partial(self._look, take)
        attempt, calls = self._tracker.attempt, self._decisions.calls
        is_fresh = self._is_of_now(self._known) and time.monotonic() - self._known.at < OTHERS_PERIOD
        others = [] if attempt is None or calls is None else calls.others()
        if self._waiting is not None:
            self._waiting.append(take)
        elif attempt is None or is_fresh or not 0 < len(others) <= MOST_ASKED:
            take()
        else:
            self._waiting = [take]
            self._ask_others(
                {}, "ranks", CALL_LIMIT, partial(self._take_others, attempt.agents_round), others
            )

    def _take_others(self, number: int, answers: Mapping[int, Mapping[str, Any]]) -> None:
        known = [
            {"group_rank": rank, **_node(answers[rank])}
            for rank in sorted(answers)
            if _has(answers[rank], _NODE)
        ]
        self._known = _Known(number, time.monotonic(), known)
        waiting, self._waiting = self._waiting, None
        for take in waiting or ():
            take()

    def _look(self, take: Callable[[], None]) -> None:
        """Look for late ranks of this node on another thread, and then call ``take``. If such a search is in
        progress, call ``take`` when it ends. If one was made within the last ten seconds, call ``take`` at
        once.
        """
        attempt, now = self._tracker.attempt, time.monotonic()
        with self._look_lock:
            if self._after_look is not None:
                self._after_look.append(take)
                return
        is_due = self._looked[0] is not attempt or now - self._looked[1] >= LOOK_PERIOD
        if attempt is None or not attempt.running() or not is_due:
            take()
            return
        self._looked, self._after_look = (attempt, now), [take]

        def look() -> None:
            from elasticrs._engine.supervise.hang_diagnosis import look_for_late

            try:
                attempt.look = look_for_late(attempt, LOOK_LIMIT)
            finally:
                self._look_has_ended()

        if not FileAccess().begin(look):
            self._look_has_ended()

    def _look_has_ended(self) -> None:
        with self._look_lock:
            waiting, self._after_look = self._after_look, None
        for take in waiting or ():
            take()

    def _tell_others(self, _order: dict[str, Any], answer: Answer) -> None:
        from elasticrs._engine.supervise.observe.job_health import late_of

        attempt = self._tracker.attempt
        ranks = () if attempt is None else attempt.running()

        def tell() -> None:
            late = [{"local_rank": rank, **late_of(attempt, rank)} for rank in ranks]
            answer({"code": DONE, "message": "", "others": self.others(), "late": late})

        self.ask_others(tell)

    def _tell_ranks(self, _order: dict[str, Any], answer: Answer) -> None:
        from elasticrs._engine.supervise.observe.job_health import late_of, progress_of, workers_of

        attempt, beats = self._tracker.attempt, self._tracker.supervisor.heartbeats()
        workers = [] if attempt is None else workers_of(attempt, progress_of(attempt, beats))

        def tell() -> None:
            for worker in workers:
                worker.update(late_of(attempt, worker["local_rank"]))
            answer({"code": DONE, "node": self._node, "workers": workers})

        self._look(tell)

    # --- drain ---

    def _place(self) -> RoundPlace:
        """Return the group rank of this node and the number of nodes in the running round of the agents."""
        self._running_attempt()
        place = None if self._decisions.calls is None else self._decisions.calls.place()
        if place is None:
            raise Refused(_NO_ROUND)
        return place

    def _drain(self, order: dict[str, Any], answer: Answer) -> None:
        if self._job.rendezvous is None:
            raise Refused("this job has no other node that could continue; use elasticctl stop")
        place = self._place()
        if order.get("node") == str(place.group_rank):
            self._drain_own(order, answer)
        else:
            self._ask_others(order, "who", CALL_LIMIT, partial(self._drain_other, order, answer, place))

    def _drain_other(
        self,
        order: dict[str, Any],
        answer: Answer,
        place: RoundPlace,
        found: Mapping[int, Mapping[str, Any]],
    ) -> None:
        def act() -> None:
            # In another round, the group ranks of the answers may belong to other nodes.
            if self._place() != place:
                raise Refused("the nodes have met again in the meantime; give the command again")
            node, own = str(order.get("node")), place.group_rank
            told = {own: self._node, **{rank: str(each.get("name")) for rank, each in found.items()}}
            names = phrases.distinct_names(told)
            ranks = (
                [rank for rank, name in names.items() if name == node]
                or [rank for rank, name in told.items() if name == node]
                or [rank for rank in names if str(rank) == node]
            )
            listed = ", ".join(f"{phrases.printable(names[rank])} ({rank})" for rank in sorted(names)[:20])
            if not ranks:
                raise Refused(
                    f"no node {phrases.printable(node)!r} has answered; these have: {listed}", USAGE
                )
            if len(ranks) > 1:
                raise Refused(f"{len(ranks)} nodes are named {node}: choose one of these: {listed}", USAGE)
            if ranks == [own]:
                self._drain_own(order, answer)
                return
            silent = {"message": f"the agent of node {node} has not answered in time"}

            def take(answers: Mapping[int, dict[str, Any]]) -> None:
                answer(_passed_on(answers.get(ranks[0]) or silent))

            self._ask_others(order, "drain", DRAIN_LIMIT, take, ranks)

        self._try(act, answer)

    def _drain_own(self, order: dict[str, Any], answer: Answer) -> None:
        """Have this node leave the job. Refuse if it hosts the store, or if too few nodes would be left."""
        rendezvous = self._job.rendezvous
        assert rendezvous is not None
        if self._decisions.hosts_store:
            raise Refused(
                f"{self._node} hosts the store in which the nodes meet, so the job would end with it"
            )
        left = self._place().size - 1
        if left < rendezvous.min_nodes:
            are_left = f"{phrases.counted(left, 'node')} would be left"
            raise Refused(f"{are_left}, and the job needs {rendezvous.min_nodes} (--nnodes)")
        take = partial(self._leave, answer, left, order.get("sender") is None)
        self._decisions.claim_drain(stays_out=order.get("stay_out") is True, take=take)

    def _leave(self, answer: Answer, left: int, is_own: bool, is_first: bool | None) -> bool:
        """Have this node leave the job, and return true, if it is the only one (``is_first``). ``None`` means
        that the connection to the rendezvous store was lost before the store has told that.
        """

        def act() -> None:
            if is_first is None:
                raise Refused(_NO_ROUND)
            if not is_first:
                raise Refused(
                    "a node is being drained already, or the nodes are about to meet again; try again when"
                    " they have met"
                )
            count = self._count()
            told = f"{self._node} leaves the job: SIGTERM to the workers; {_who_continues(left)}"
            if is_own:
                answer({"message": told})

            event = machine.SignalReceived(signal.SIGTERM, ends_job=False, order="drain")

            def tell(sent: Delivery) -> None:
                fields = delivery(count, sent)
                answer(fields if is_own else {**fields, "message": f"{told}; {fields['message']}"})

            self._agent.ask_to_stop(event, tell)

        return self._try(act, answer)

    # --- checkpoint ---

    def _checkpoint(self, order: dict[str, Any], answer: Answer) -> None:
        attempt = self._running_attempt()
        if self._agent.checkpoints is not None:
            self._agent.ask_for_checkpoint(self._agent.checkpoints)
            told = "all workers save at the end of the same step; the console of the job tells the result"
            answer({"code": DONE, "message": told})
            return
        self._require_can_save()
        if attempt.plan.ranks[0].group_world_size == 1:
            self._agent.pass_on(signal.SIGUSR1, partial(_tell_delivery, answer, self._count()))
        elif self._decisions.calls is None:
            raise Refused(
                "a rendezvous handler of another package connects the nodes of this job, so its agents cannot"
                " agree: send SIGUSR1 to all agents at the same time"
            )
        else:
            take = partial(self._save_everywhere, order, answer, self._decisions.calls.others())
            self._ask_others(order, "can checkpoint", CALL_LIMIT, take)

    def _require_can_save(self) -> None:
        attempt = self._running_attempt()
        ranks, pids = attempt.global_ranks(), attempt.running()
        deaf = sorted(ranks[rank] for rank in pids if can_take(pids[rank], signal.SIGUSR1) is False)
        if deaf:
            who = phrases.ranks_text(deaf, 8)
            advice = f". A checkpoint on request needs one of these: {_WAYS}"
            raise Refused(f"SIGUSR1 would kill {who}", advice=advice)
        if self._agent.holds(signal.SIGUSR1):
            raise Refused("SIGUSR1 is already being held back until all ranks have made the same step")

    def _tell_if_it_can_save(self, _order: dict[str, Any], answer: Answer) -> None:
        self._require_can_save()
        answer({"code": DONE})

    def _save_everywhere(
        self,
        order: dict[str, Any],
        answer: Answer,
        others: Sequence[int],
        answers: Mapping[int, Mapping[str, Any]],
    ) -> None:
        def act() -> None:
            for rank in others:
                if rank not in answers:
                    raise Refused(f"the agent of the node with group rank {rank} does not answer", FAILED)
                if answers[rank].get("code") != DONE:
                    raise Refused(str(answers[rank].get("message")))
            self._require_can_save()
            joined = _Joined(answer, 1 + len(others))
            self._ask_others(order, "checkpoint", SAVE_HOLD + CALL_LIMIT, joined.add_nodes, others)
            count = self._count()
            self._agent.pass_on(signal.SIGUSR1, lambda sent: joined.add(delivery(count, sent)))

        self._try(act, answer)

    def _save(self, _order: dict[str, Any], answer: Answer) -> None:
        self._require_can_save()
        self._agent.pass_on(signal.SIGUSR1, partial(_tell_delivery, answer, self._count()))

    # --- stacks ---

    def _stacks(self, order: dict[str, Any], answer: Answer) -> None:
        attempt = self._running_attempt()
        others: SimpleQueue[Mapping[int, Mapping[str, Any]]] = SimpleQueue()
        self._ask_others(order, "stacks", CALL_LIMIT, others.put)
        # Read the stacks on another thread, because that waits for the workers and reads files.
        FileAccess().begin(partial(_tell_stacks, attempt, others, answer))

    def _tell_own_stacks(self, _order: dict[str, Any], answer: Answer) -> None:
        FileAccess().begin(partial(_tell_stacks, self._running_attempt(), None, answer))


class _Known(Value):
    """Last answers of other nodes' agents about their ranks, with the round and the time of the answers."""

    round: int
    at: float
    nodes: list[dict[str, Any]]


def _has(value: Any, checks: Mapping[str, Check]) -> bool:
    """Return true if ``value``, a part of another agent's answer, has the fields that ``checks`` names, and
    their values pass these checks.
    """
    return isinstance(value, dict) and all(
        name in value and check(value[name]) for name, check in checks.items()
    )


_PROGRESS: dict[str, Check] = {
    "step": INT,
    "counts": one_of("keep", "script", "attempt"),
    "age_seconds": optional(SPAN),
}
_LATE: dict[str, Check] = {"times": COUNT, "of": COUNT, "operation": NAME, "lag_ms": SPAN, "may_wait": FLAG}
_WORKER: dict[str, Check] = {
    "rank": optional(COUNT),
    "local_rank": COUNT,
    "role_rank": WHOLE,
    "pid": COUNT,
    "state": one_of("RUNNING", "PAUSED", "EXITED"),
    "exitcode": optional(WHOLE),
    "was_stopped": FLAG,
    "progress": optional(lambda value: _has(value, _PROGRESS)),
    "late": optional(lambda value: _has(value, _LATE)),
    "has_recorder": optional(FLAG),
}
_NODE: dict[str, Check] = {"node": NAME, "workers": list_of(lambda value: _has(value, _WORKER), MAX_ANSWER)}
_DELIVERY: dict[str, Check] = {"ranks": COUNT, "step": optional(INT), "why": TEXT, "waited": SPAN}


def _node(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status of a node's workers from its agent's answer, without fields that are unknown here."""
    workers = []
    for each in told["workers"]:
        worker = {name: each[name] for name in _WORKER}
        for name, checks in (("progress", _PROGRESS), ("late", _LATE)):
            if worker[name] is not None:
                worker[name] = {field: worker[name][field] for field in checks}
        workers.append({**worker, "training": None})
    return {"node": told["node"], "workers": workers}


class _Joined:
    """Joins the answers of all nodes' agents about a signal into one answer to ``elasticctl``."""

    def __init__(self, answer: Answer, nodes: int) -> None:
        self._answer, self._nodes = answer, nodes
        self._parts: list[Mapping[str, Any]] = []
        self._left = 2

    def add_nodes(self, answers: Mapping[int, Mapping[str, Any]]) -> None:
        self.add(*answers.values())

    def add(self, *parts: Mapping[str, Any]) -> None:
        """Collect the answer of this node, or the answers of all other nodes. The second call has the rest of
        the answers, so it sends the joined answer to ``elasticctl``.
        """
        self._parts += parts
        self._left -= 1
        if not self._left:
            self._answer(joined(self._parts, self._nodes))


def joined(parts: Sequence[Mapping[str, Any]], nodes: int) -> dict[str, Any]:
    """Return the answer to ``elasticctl`` about a signal that all agents have sent to their ranks. ``parts``
    are the agents' answers, as :func:`delivery` returns them. ``nodes`` tells how many nodes were asked.
    """
    sent = [each for each in parts if _has(each, _DELIVERY)]
    ranks = sum(each["ranks"] for each in sent)
    steps = {each["step"] for each in sent}
    why = [each["why"] for each in sent if each["why"]]
    why += [str(each.get("message")) for each in parts if each not in sent]
    why += ["another node has not answered in time"] * (len(parts) < nodes)
    why += ["the nodes have chosen different steps"] * (len(steps) > 1 and not why)
    waited = max((each["waited"] for each in sent), default=0.0)
    step = steps.pop() if len(steps) == 1 and not why else None
    return delivery(ranks, Delivery(signal.SIGUSR1, step, why[0] if why else "", waited))


def _reply(server: _core.HealthServer, number: int, fields: dict[str, Any]) -> None:
    server.reply(number, json.dumps(fields), is_last="code" in fields)


def _passed_on(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer to ``elasticctl`` with the exit code and the text of another agent's answer. The code
    is :data:`FAILED` if that agent has told none.
    """
    code = fields.get("code")
    is_known = type(code) is int and DONE <= code <= REFUSED
    return {"code": code if is_known else FAILED, "message": str(fields.get("message"))}


def _who_continues(nodes: int) -> str:
    return f"{nodes} nodes continue" if nodes != 1 else "1 node continues"


def _tell_delivery(answer: Answer, ranks: int, sent: Delivery) -> None:
    answer(delivery(ranks, sent))


def delivery(ranks: int, sent: Delivery) -> dict[str, Any]:
    """Return the answer to ``elasticctl`` that tells to how many ranks a signal was sent, and how."""
    to = f"{phrases.signal_name(sent.signum)} sent to {phrases.counted(ranks, 'rank')}"
    code = NOT_AGREED if sent.why else DONE
    if sent.step is not None:
        waited = phrases.milliseconds(round(sent.waited * 1e9))
        how = f"after step {sent.step:,} of this attempt, held {waited}"
    elif sent.why:
        how = f"without an agreed step: {sent.why}"
    else:
        how = f"at once: {sent.at_once}"
    fields = {"signal": sent.signum, "step": sent.step, "why": sent.why, "waited": sent.waited}
    return {"code": code, "message": f"{to} {how}", "ranks": ranks, **fields}


def _tell_stacks(
    attempt: Attempt, others: SimpleQueue[Mapping[int, Mapping[str, Any]]] | None, answer: Answer
) -> None:
    """Answer ``elasticctl`` with the Python stacks of all nodes' ranks. ``others`` is a queue that gets the
    answers of the other agents. If it is ``None``, tell another agent the stacks of this node's ranks only.
    """
    try:
        from elasticrs._engine.supervise.hang_diagnosis import (
            RunningRanks,
            told_stacks,
            where_running,
        )

        own, world_size = where_running(attempt, STACKS_LIMIT), attempt.world_size
        if others is None:
            answer({"code": DONE, **own.encoded(attempt.plan.ranks[0].group_world_size, world_size)})
            return
        answers = others.get(timeout=CALL_LIMIT + 1)
        found = told_stacks([own, *map(RunningRanks.decoded, answers.values())], world_size)
        answer({"code": DONE, **found})
    # An error in the diagnosis code must not leave the user without an answer.
    except Exception as error:
        answer({"code": FAILED, "message": f"the stacks could not be read: {error!r}"})
