"""Decisions of an agent whose nodes meet through a rendezvous handler of the program or of another package.

Each agent has a restart budget of its own, as in torch. The handler's methods may block, so each call has a
thread of its own, and the loop is woken when the call has returned.

- **HANDLER-1** At most one method of the handler runs at any time.
- **HANDLER-2** The answer of a call is dropped if the workers have ended since, or a signal has stopped them.
- **HANDLER-3** The report of the job waits for no method. A restart and the end of the job wait at most
  :data:`PATIENCE` seconds for a method that must return, and a signal ends the wait. Only
  ``next_rendezvous`` has no limit, because the rendezvous has its own.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import time
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any

from elasticrs._engine import public
from elasticrs._engine.job.config import DEFAULT_EXIT_BARRIER_TIMEOUT
from elasticrs._engine.process.background_call import BackgroundCall
from elasticrs._engine.process.signals import suspend
from elasticrs._engine.supervise import state_machine as machine
from elasticrs._engine.supervise.decide.decisions import OneAgent
from elasticrs._engine.workers.plan import NodeRanks, NodeShare, Plan, StorePort, node_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticrs import _core
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.process.console import Console
    from elasticrs._engine.process.signals import SignalPipe

PATIENCE = 10.0
"""Maximum number of seconds to wait for a method of the handler that must return."""

_QUIET_FOR = 3.0
"""Seconds of a wait for other nodes after which a line tells the user about it."""

_BARRIER_PERIOD = 0.1
"""Maximum number of seconds between two polls of the store in the exit barrier."""

_WAITS = "next_rendezvous"
"""The method of the handler that may wait for other nodes."""

_INFO = "torchelastic/role_info/"
_RANKS = "torchelastic/assigned_ranks/"
_TERMINAL_STATE = "torchelastic/agent/terminal_state"


class HandlerNodes(OneAgent):
    """Makes the decisions of an agent that asks a rendezvous handler for each plan.

    Attributes:
        error: exception with which the handler has ended the job, if it has.
        keeps_handler: true if the caller shuts the handler down.
    """

    keeps_handler = False

    can_end_job = False

    def __init__(self, job: JobSpec, make_handler: Callable[[], Any], console: Console) -> None:
        super().__init__(job)
        self._make_handler = make_handler
        self._console = console
        limit = job.exit_barrier_timeout
        self._barrier_timeout = DEFAULT_EXIT_BARRIER_TIMEOUT if limit is None else limit
        self.error: Exception | None = None
        self._handler: Any = None
        # Keep what the handler has returned, because torch's may hold the port of the workers' store.
        self._info: Any = None
        self._must_return = Event()
        self._next: tuple[Callable[[], Any], Callable[[Any], list[machine.Action]]] | None = None
        self._asked_at = 0.0
        # Method of the handler that is being called, and since when (monotonic seconds).
        self._running: tuple[str, float] | None = None
        # Reason not to wait for the present call any more.
        self._why_hung: str | None = None
        # Call that the loop has left behind.
        self._last_call: BackgroundCall | None = None
        # End of workers that have succeeded, while this node waits for the others.
        self._success: machine.GroupEnded | None = None
        # Line that tells about a long wait.
        self._line: str | None = None

    def node_names(self, *, asks: bool = False) -> Sequence[str] | None:
        is_alone = self._info is not None and self._info.world_size == 1
        return super().node_names(asks=asks) if is_alone else None

    def step(self, event: machine.Event) -> list[machine.Action]:
        if isinstance(event, machine.GroupEnded):
            self._must_return.set()
            self._console.group_rank = None
            has_succeeded = event.outcome == "succeeded" and event.why_unfit is None
            if has_succeeded and self.signum is None and self.has_taken_part:
                self._success = event
                others = self._info.world_size - 1
                line = (
                    f"the workers of this node have succeeded; waiting for {others} other "
                    f"node{'s' if others > 1 else ''} to finish (for at most {self._barrier_timeout:g} s, "
                    "--exit-barrier-timeout)"
                )
                self._ask_handler(self._wait_for_others, self._take_end, line if others else None)
                return []
        actions = super().step(event)
        if isinstance(event, machine.Started):
            self._ask_handler(self._watch, self._take_change)
        elif isinstance(event, machine.SignalReceived) and self._success is not None:
            success, self._success = self._success, None
            self._must_return.set()
            actions += super().step(success)
        return actions

    def next_plan(self, supervisor: _core.Supervisor) -> None:  # noqa: ARG002 -- the base class's signature
        self.release_plan()
        self._ask_handler(
            self._meet,
            self._take_round,
            f"waiting for the rendezvous: back end {self._job.rdzv_backend!r} has not completed it after "
            f"{_QUIET_FOR:g} s, and decides how long to wait",
        )

    def _ask_handler(
        self, ask: Callable[[], Any], take: Callable[[Any], list[machine.Action]], line: str | None = None
    ) -> None:
        """Call ``ask`` on another thread once the present call has returned. ``take`` gets its answer. If the
        answer takes long, ``line`` is printed.
        """
        self._next = ask, take
        self._line, self._asked_at = line, time.monotonic()
        self._must_return.set()
        if self._call is None:
            self._ask_next()

    def _give_up_at(self) -> float:
        """Return the monotonic time in seconds at which the agent no longer waits for the present call."""
        is_queued = self._next is not None and self._call is not None
        if self._success is None and not is_queued:
            return math.inf
        running = self._running
        if running is None:
            # A call of the workers' store may hang in the exit barrier.
            return self._asked_at + self._barrier_timeout + PATIENCE
        return max(running[1], self._asked_at) + PATIENCE

    def _why_not_returned(self) -> str:
        running = self._running
        if running is None:
            return "the workers' store does not answer"
        return f"{running[0]} has not returned within {PATIENCE:g} s"

    def seconds_left(self) -> float:
        due = self._give_up_at()
        if self._line is not None:
            due = min(due, self._asked_at + _QUIET_FOR)
        # A method whose time is up before the next call of this function has not been called yet.
        return max(0.0, min(super().seconds_left(), PATIENCE, due - time.monotonic()))

    def look_around(self) -> list[machine.Action]:
        now, line = time.monotonic(), self._line
        if line is not None and now >= self._asked_at + _QUIET_FOR:
            self._line = None
            self._console.say(line)
        if now < self._give_up_at():
            return []
        self._next, self._why_hung = None, self._why_not_returned()
        return self._failed(public("rendezvous.api").RendezvousTimeoutError(self._why_hung))

    def find_overdue(self) -> tuple[float, str | None]:
        running = self._running
        if running is None or running[0] == _WAITS:
            return super().find_overdue()
        return time.monotonic() - running[1], running[0]

    def _method(self, name: str) -> Any:
        self._running = name, time.monotonic()
        try:
            return getattr(self._handler, name)()
        finally:
            self._running = None

    def _ask_next(self) -> None:
        if self._next is not None:
            (ask, take), self._next = self._next, None
            self._must_return.clear()
            # Programs that the handler starts inherit the signal mask.
            self._ask(ask, partial(self._answered, take), blocks_signals=False)

    def _answered(
        self, take: Callable[[Any], list[machine.Action]], call: BackgroundCall
    ) -> list[machine.Action]:
        actions: list[machine.Action] = []
        if not self._must_return.is_set():
            self._line = None
            try:
                answer = call.take()
            except Exception as error:
                actions = self._failed(error)
            else:
                actions = take(answer)
        self._ask_next()
        return actions

    def _failed(self, error: Exception) -> list[machine.Action]:
        success, self._success = self._success, None
        if success is not None:
            # As in torch, the job has succeeded: the work is done, and the node that hosts the store may have
            # exited already.
            self._console.say(f"other nodes could not be waited for: {error}")
            return super().step(success)
        if self.phase is machine.Phase.STOPPING:
            # A worker has failed meanwhile. The restart asks the handler again.
            return []
        api = public("rendezvous.api")
        is_running = self.phase is machine.Phase.RUNNING
        if api.is_kind(error, api.RendezvousGracefulExitError):
            if is_running:
                self._console.say(f"this node is no longer needed: {error}; stopping the workers")
            self.has_taken_part = False
            return self.step(machine.NotNeeded())
        if not (api.is_kind(error, api.RendezvousError) or isinstance(error, (OSError, RuntimeError))):
            # A mistake in the settings or in the handler's program.
            raise error
        self.error = error
        why = f"the rendezvous failed: {type(error).__name__}: {error}"
        if is_running:
            self._console.say(f"{why}; stopping the workers")
        return self.step(machine.RendezvousFailed(why))

    def _meet(self) -> tuple[Any, NodeRanks, bool]:
        if self._handler is None:
            self._handler = self._make_handler()
        info = self._method(_WAITS)
        ranks = agreed_ranks(info.store, info.rank, info.world_size, self._share)
        return info, ranks, self._handler.use_agent_store

    @property
    def _share(self) -> NodeShare:
        return NodeShare(self._job.role, self._job.nproc)

    def _take_round(self, answer: tuple[Any, NodeRanks, bool]) -> list[machine.Action]:
        self._info, ranks, use_agent_store = answer
        bootstrap, port = self._info.bootstrap_store_info, None
        address, number = self._job.master_addr, None
        if bootstrap is not None:
            address, number = bootstrap.master_addr, bootstrap.master_port
        if number is None:
            if ranks.group_world_size > 1:
                return self.step(
                    machine.RendezvousFailed("the rendezvous gave no port for the workers' store")
                )
            port = StorePort(is_served=False)
            number = port.number
        workers = ranks.workers(self._share)
        store = self._info.store
        plan = Plan(workers, address, number, port, use_agent_store=use_agent_store)
        self._set_plan(plan, lambda: store)
        if ranks.group_world_size > 1:
            self._console.group_rank = ranks.group_rank
        return self.step(machine.RendezvousCompleted())

    def _watch(self) -> int:
        """Return the number of nodes that wait to join, once there are any; 0 if the workers have ended."""
        while not self._must_return.wait(self._job.monitor_interval):
            waiting = int(self._method("num_nodes_waiting"))
            if waiting > 0:
                return waiting
        return 0

    def _take_change(self, waiting: int) -> list[machine.Action]:
        if not waiting or self.phase is not machine.Phase.RUNNING:
            return []
        who = f"{waiting} node{' waits' if waiting == 1 else 's wait'} for the next round"
        self._console.say(f"{who}: stopping the workers, which then start again (no restart charged)")
        return self.step(machine.MembershipChanged())

    def _wait_for_others(self) -> tuple[bool, list[str]]:
        """Wait for the other nodes. Return false if the workers must run again, and notes to print."""
        info, job = self._info, self._job
        tells = hasattr(self._handler, "set_succeeded")
        if tells:
            self._method("set_succeeded")

        def has_ended() -> bool:
            # Do not watch the handlers of torch: they also count new nodes, which are no reason to restart.
            is_over = tells and self._method("num_nodes_waiting") > 0
            return is_over or self._must_return.is_set()

        notes: list[str] = []
        have_met = info.world_size == 1 or wait_for_others(
            *(info.store, info.world_size, self._barrier_timeout, job.monitor_interval),
            has_ended=has_ended,
            pause=self._must_return.wait,
            say=notes.append,
        )
        return have_met, notes

    def _take_end(self, answer: tuple[bool, list[str]]) -> list[machine.Action]:
        (have_met, notes), success = answer, self._success
        if success is None:
            return []
        self._success = None
        for note in notes:
            self._console.say(note)
        if not have_met:
            self._console.say("the round has ended on another node: starting the workers again")
            super().step(machine.MembershipChanged())
            success = success.replaced(outcome="stopped")
        return super().step(success)

    def close(self) -> None:
        self._must_return.set()
        if self._call is not None:
            self._last_call, self._call = self._call, None
        super().close()

    def leave(self, signals: SignalPipe | None) -> None:
        call, self._last_call = self._last_call, None
        is_free = call is None or (self._why_hung is None and self._has_returned(call, signals))
        why: object = self._why_hung or self._why_not_returned()
        if call is not None:
            # End a method that waits for other nodes, as an exception of a signal handler does in torch.
            # Otherwise this node would join a round without an agent if the program continues.
            call.interrupt()
            call.close()
        # Do not shut the handler down after a signal, because that would end the job on all nodes.
        if self._handler is not None and not self.keeps_handler and self.signum is None:
            if is_free:
                why = self._shut_down(signals)
            if why is not None:
                self._console.say(f"the rendezvous handler could not be shut down: {why}")
        self._handler = None

    def _shut_down(self, signals: SignalPipe | None) -> object:
        """Shut the handler down. Return why that failed, if it has."""
        call = BackgroundCall(partial(self._method, "shutdown"), blocks_signals=False)
        try:
            if self._has_returned(call, signals):
                call.take()
                return None
            call.interrupt()
            return None if self.signum is not None else self._why_not_returned()
        except Exception as error:
            return repr(error)
        finally:
            call.close()

    def _has_returned(self, call: BackgroundCall, signals: SignalPipe | None) -> bool:
        """Wait for a call for at most :data:`PATIENCE` seconds, or until a signal asks to stop."""
        poll = select.poll()
        poll.register(call.fd, select.POLLIN)
        if signals is not None:
            poll.register(signals.fd, select.POLLIN)
        deadline = time.monotonic() + PATIENCE
        while self.signum is None and (left := deadline - time.monotonic()) > 0:
            if any(fd == call.fd for fd, _ in poll.poll(1000 * left)):
                return True
            if signals is None:
                continue
            for signum in signals.take():
                if signum == signal.SIGTSTP and signum not in self._job.signals:
                    suspend(None, signals)
                elif signum not in self._job.forwarded:
                    self.signum = signum
        return False


def agreed_ranks(store: Any, group_rank: int, group_world_size: int, own: NodeShare) -> NodeRanks:
    """Return the ranks of a node's workers. Use the store only if nodes may differ in workers or roles."""
    if group_world_size == 1 or os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL", "0") == "1":
        return node_ranks([own] * group_world_size)[group_rank]
    return exchange_ranks(store, group_rank, group_world_size, own)


def exchange_ranks(store: Any, group_rank: int, group_world_size: int, own: NodeShare) -> NodeRanks:
    """Agree with the other nodes on the ranks of all workers.
    Agents of torch can take part, because the keys and the JSON format are torch's. The wait for other nodes
    is limited by the timeout of the shared store.
    """
    told = {"role": own.role, "rank": group_rank, "local_world_size": own.local_world_size}
    store.set(f"{_INFO}{group_rank}", json.dumps(told))
    if group_rank == 0:
        groups = range(group_world_size)
        infos = map(json.loads, store.multi_get([f"{_INFO}{rank}" for rank in groups]))
        nodes = [NodeShare(str(info["role"]), int(info["local_world_size"])) for info in infos]
        answers = [
            json.dumps([ranks.first_rank, ranks.world_size, ranks.first_role_rank, ranks.role_world_size])
            for ranks in node_ranks(nodes)
        ]
        store.multi_set([f"{_RANKS}{rank}" for rank in groups], answers)
    first, world_size, first_in_role, role_world_size = json.loads(store.get(f"{_RANKS}{group_rank}"))
    return NodeRanks(group_rank, group_world_size, first, world_size, first_in_role, role_world_size)


def wait_for_others(
    store: Any,
    world_size: int,
    limit: float,
    period: float,
    *,
    has_ended: Callable[[], bool],
    pause: Callable[[float], object],
    say: Callable[[str], object],
) -> bool:
    """Wait in torch's exit barrier until all nodes have finished, for at most ``limit`` seconds.
    Return false if ``has_ended`` has returned true, because the round has ended for another reason. The store
    is polled every ``period`` seconds, or more often.
    """
    deadline = time.monotonic() + limit
    key = public("utils.store._barrier_nonblocking")(store, world_size, _TERMINAL_STATE)
    while not store.check([key]):
        if has_ended():
            return False
        left = deadline - time.monotonic()
        if left <= 0:
            say(f"other nodes did not finish within {limit:g} s")
            break
        pause(min(period, _BARRIER_PERIOD, left))
    return True
