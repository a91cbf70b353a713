"""Execute the actions of the rendezvous state machine, such as store requests and timers. Actions that
concern the workers or the user (``LoopAction`` in :mod:`.messages`) are returned to the caller in order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from elasticrs._engine.job.phrases import duration
from elasticrs._engine.job.value import Value
from elasticrs._engine.nodes.protocol import messages
from elasticrs._engine.nodes.protocol.formation import MEMBERS_PER_TXN, waits_for
from elasticrs._engine.nodes.protocol.machine import Member, step
from elasticrs._engine.nodes.protocol.messages import Outcome
from elasticrs._engine.nodes.protocol.records import DamagedError, Head, number_of, table_of, workers_keys
from elasticrs._engine.nodes.protocol.rounds import others_running
from elasticrs._engine.nodes.rendezvous_store import CannotHost, KeptState, RendezvousStore
from elasticrs._engine.nodes.transport.coordination import (
    Changes,
    ConnectionLost,
    Delete,
    Missing,
    ModifiedAt,
    Notice,
    Put,
    Range,
    Reply,
    Txn,
    Unwatch,
    Watch,
)
from elasticrs._engine.workers.plan import StorePort

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from elasticrs import _core
    from elasticrs._engine.nodes.calls import Calls, Exchange, RoundPlace, Serve
    from elasticrs._engine.nodes.hosting import Hosting
    from elasticrs._engine.nodes.protocol.messages import Action, Event, LoopAction
    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
    from elasticrs._engine.nodes.transport.coordination import Entry, StoreEvent

_FAREWELL = "farewell"
"""Name of the timer that limits how long the store's host waits until other agents know the job's outcome."""

_FAREWELL_TICK = "farewell tick"
_TICK = 0.01
_PORT = "port"
"""Name of the timer for the next attempt to take the store's port back from the workers."""

_LISTEN = "listen"
"""Name of the timer for the moment at which this agent begins to watch the requests of other agents."""

_AFTER_START = 0.05
"""Seconds after which an agent that starts its workers watches others' requests. The start is urgent."""

_NAMES = 1 << 62
"""Tag of the request for the nodes' names. The state machine's tags count from 1, so it ignores the reply."""

_CALLS, _CLAIM, _EXCHANGE = _NAMES + 1, _NAMES + 2, _NAMES + 3
"""Tags of requests to the store: to watch other agents' requests, to drain this node, and to begin the first
exchange of values with other agents. Later exchanges have the tags after it.
"""

MOST_NAMES = 10 * MEMBERS_PER_TXN
"""Maximum number of nodes whose names an agent reads from the store. If all agents are asked for their
status, each reads all names: the bytes sent grow with the square of the number of nodes.
"""


def now() -> float:
    """Return the time of the boot clock, in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Timers:
    __slots__ = ("_deadlines",)

    def __init__(self) -> None:
        self._deadlines: dict[str, float] = {}

    def arm(self, name: str, seconds: float) -> None:
        self._deadlines[name] = now() + seconds

    def disarm(self, name: str) -> None:
        self._deadlines.pop(name, None)

    def take_due(self) -> list[str]:
        """Remove the timers that are due and return their names, earliest first."""
        moment = now()
        due = sorted((at, name) for name, at in self._deadlines.items() if at <= moment)
        for _, name in due:
            del self._deadlines[name]
        return [name for _, name in due]

    def left(self, name: str) -> float | None:
        """Return the seconds until a timer is due; ``None`` if it is not armed."""
        return max(0.0, self._deadlines[name] - now()) if name in self._deadlines else None

    def seconds_left(self, limit: float) -> float:
        if not self._deadlines:
            return limit
        return max(0.0, min(limit, min(self._deadlines.values()) - now()))


_PAUSE = 1.0
"""Minimum seconds by which the agent's loop has to be late for the agent to count as paused."""

_AFTER_PAUSE = 5.0
"""Seconds after a pause of the agent during which the pause is named as a cause of a lost connection."""


class Pauses:
    """Notices when the agent did not run, because it (SIGSTOP) or its machine was paused. The store has then
    got no keep-alive message. So the store or its host is not to blame for a lost connection.
    """

    __slots__ = ("_due", "_ended", "_seconds")

    def __init__(self) -> None:
        self._due = self._ended = self._seconds = 0.0

    def wait(self, seconds: float) -> None:
        """Record that the agent's loop waits for at most these seconds."""
        # The last wait may have been ended by an event that does not concern the store.
        self.look()
        self._due = now() + seconds

    def look(self) -> None:
        """Record a pause of this agent if the loop's last wait ended much later than it should have. The loop
        calls this after each wait.
        """
        late = now() - self._due if self._due else 0.0
        if late > _PAUSE:
            self._ended, self._seconds = now(), late
        self._due = 0.0

    def explain(self, why: str) -> str:
        """Add a pause that has just ended to the reason ``why`` a connection was lost."""
        if not self._seconds or now() - self._ended > _AFTER_PAUSE:
            return why
        return f"this agent did not run for {duration(self._seconds)} (it or its machine was paused); {why}"


PORT_PATIENCE = 10.0
"""Seconds for which sockets of the workers may still occupy the port after the workers have exited."""

_PORT_TICK, _SLOW_PORT_TICK = 0.05, 1.0


class LentPort:
    """Port of the rendezvous store. If this agent hosts that store, the port is lent to the workers' store
    during a round. Connections to the rendezvous store that are already open stay open.
    """

    __slots__ = ("_deadline", "_is_lent", "_store", "trouble")

    def __init__(self, store: RendezvousStore) -> None:
        self._store = store
        self._is_lent = False
        self._deadline: float | None = None
        self.trouble = ""

    def lend(self) -> bool:
        """Release the port for the workers' store. On failure, return false and set :attr:`trouble`."""
        if not self.take_back():
            return False
        if self._store.hosts:
            self._store.stop_listening()
            self._is_lent = True
        return True

    def take_back(self) -> bool:
        if self._is_lent:
            try:
                self._store.listen_again()
            except OSError as error:
                self.trouble = str(error)
                if self._deadline is None:
                    self._deadline = now() + PORT_PATIENCE
                return False
        self._is_lent, self._deadline = False, None
        return True

    @property
    def is_overdue(self) -> bool:
        return self._deadline is not None and now() >= self._deadline

    @property
    def pause(self) -> float:
        """Seconds until the next attempt to listen on the port."""
        return _SLOW_PORT_TICK if self.is_overdue else _PORT_TICK


class _Claim(Value):
    """Request to the store to drain this node, and what is written once :attr:`take` has got the reply."""

    take: Callable[[bool | None], bool]
    if_it_leaves: Sequence[Put]
    if_it_stays: Sequence[Delete]


class Driver:
    """Driver of the state machine with which one agent takes part in the rendezvous of the nodes. Raises
    :class:`.UsageError` for an endpoint that other nodes could not use. Without a process ``supervisor``, a
    separate thread serves the stores that this agent hosts. Unless ``use_agent_store`` is true, the worker
    with rank 0 serves the workers' store on a port that its agent reserves.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        supervisor: _core.Supervisor | None,
        use_agent_store: bool = True,
        kept: KeptState | None = None,
        found: Hosting | None = None,
        **workers: Any,
    ) -> None:
        self._rendezvous = rendezvous
        self._supervisor = supervisor
        self._workers = workers
        self.store = RendezvousStore(rendezvous, supervisor, kept, found)
        self._member: Member | None = None
        self._timers = Timers()
        self._pauses = Pauses()
        self._store_port: StorePort | None = None
        self._use_agent_store = use_agent_store
        self._exit: messages.Exit | None = None
        self._port = LentPort(self.store)
        self._held_back: Event | None = None
        self._is_told = False
        self._asked_form = ""
        self._names: list[str] | None = None
        self._calls: Calls | None = None
        self._claimed: _Claim | None = None
        self._exchanges: dict[int, Exchange] = {}
        self._exchange_count = 0
        self.serve: Serve | None = None

    @property
    def is_leaving(self) -> bool:
        """True if this agent was asked to leave the job, or the job has finished."""
        return self._member is not None and self._member.leaving is not None

    @property
    def last_head(self) -> Head | None:
        return None if self._member is None else self._member.last_head

    @property
    def others_running(self) -> int:
        """Number of nodes on which the job runs without this node, which waits as a spare; otherwise 0."""
        return 0 if self._member is None else others_running(self._member)

    def waits_for(self) -> str | None:
        """Return a text about what this node waits for before it starts its workers. If a timer limits the
        wait, the text contains the time that is left. See :func:`.formation.waits_for`.
        """
        found = None if self._member is None else waits_for(self._member)
        if found is None:
            return None
        what, timer = found
        left = self._timers.left(timer)
        return what if left is None else f"{what} (for at most {duration(left)})"

    def node_names(self, *, asks: bool = False) -> list[str] | None:
        """Return the names of the round's nodes, ordered by group rank; ``None`` while this agent does not
        know them. The agent that leads the job always knows them. Other agents request them from the store
        when this method is first called with ``asks`` in a round.
        """
        member, head = self._member, self.last_head
        leader = None if member is None else member.leader
        if leader is not None:
            return [seat.name for seat in leader.view.seats]
        if member is None or head is None:
            return None
        if head.form == self._asked_form:
            return self._names
        if asks and member.head is not None and 0 < head.size <= MOST_NAMES:
            self._asked_form, self._names = head.form, None
            parts = -(-head.size // MEMBERS_PER_TXN)
            self.store.send(Txn(_NAMES, [], [Range(member.keys.table(head.form), parts)]))
        return None

    @property
    def job_number(self) -> int:
        """Number that tells jobs of the same name apart (the store's revision when it was created); 0 while
        unknown.
        """
        return 0 if self._member is None else self._member.joining.job_revision

    @property
    def calls(self) -> Calls:
        """Object that sends requests to the agents of the other nodes, and receives their requests."""
        if self._calls is None:
            from elasticrs._engine.nodes.calls import Calls

            assert self._member is not None
            agent = self._member.agent
            self._calls = Calls(
                *(self.store.send, self._member.keys, agent.agent, agent.node, self._place, self._timers.arm)
            )
            self._calls.serve = self.serve
        return self._calls

    def _place(self) -> RoundPlace | None:
        from elasticrs._engine.nodes.calls import RoundPlace

        link = None if self._member is None else self._member.link
        if link is None or link.head is None or link.slot is None:
            return None
        head, slot = link.head, link.slot
        if (slot.round, slot.form) != (head.round, head.form):
            return None
        return RoundPlace(head.round, slot.group_rank, head.size)

    def begin_exchange(self, start: messages.Start, name: str, own: bytes) -> Exchange:
        """Begin to exchange a value with all agents of a round, see :class:`.Exchange`. Does not block.
        ``start``: the action that has started the workers of the round.
        """
        from elasticrs._engine.nodes.calls import Exchange, RoundPlace

        assert self._member is not None
        place = RoundPlace(start.round, start.ranks.group_rank, start.ranks.group_world_size)
        prefix = f"{self._member.keys.exchanges}{self.job_number}/{place.round}/{name}/"
        tag = _EXCHANGE + self._exchange_count
        self._exchange_count += 1
        exchange = Exchange(self.store.send, prefix, place, own, tag)
        self._exchanges = {tag: each for tag, each in self._exchanges.items() if not each.is_over}
        # Until the earlier exchange of this name is over, the store would give both the same number.
        if self.store.fd is None or any(each.prefix == prefix for each in self._exchanges.values()):
            exchange.lose()
        else:
            self._exchanges[tag] = exchange
        return exchange

    def claim_drain(self, *, stays_out: bool, take: Callable[[bool | None], bool]) -> None:
        """Record in the store that ``elasticctl`` drains this node (removes it from the job) in the running
        round. Then call ``take``, which returns whether this node leaves the job.

        Args:
            stays_out: whether the job does not admit this node again once it has left.
            take: function that is called with true; with false if a node is being drained already, or if no
                round runs; with ``None`` if there is no connection to the store, or it is lost.
        """
        member = self._member
        if member is None or member.link is None:
            take(None)
            return
        # The number of nodes is known only while a round runs: it ends when a node joins, leaves or is lost.
        if member.head is None or member.head.state != "RUNNING" or self._claimed is not None:
            take(False)
            return
        keys, node = member.keys, member.agent.node.encode()
        leaving = keys.leaving(member.head.round)
        compares = [ModifiedAt(keys.head, member.link.head_revision), Missing(leaving)]
        # Only a node that does leave is barred. A round in which none leaves is free for the next order.
        bar = [Put(keys.bar(member.agent.node), node, False)] if stays_out else []
        self._claimed = _Claim(take, bar, [Delete(leaving)])
        self.store.send(Txn(_CLAIM, compares, [Put(leaving, node, True)]))

    def _end_claim(self, *, is_ok: bool | None) -> None:
        claim, self._claimed = self._claimed, None
        if claim is not None:
            writes = claim.if_it_leaves if claim.take(is_ok) else claim.if_it_stays
            if is_ok and writes:
                self.store.send(Txn(0, [], writes))

    # --- events in, actions out ---

    def begin(self) -> list[LoopAction]:
        try:
            self.store.host_if_possible()
        except CannotHost as error:
            return [messages.Exit(Outcome("refused", str(error)))]
        self._member = Member(self._rendezvous, self.store.this_agent(**self._workers))
        doubt = self.store.doubt
        return [*([messages.Announce(doubt)] if doubt else []), *self.tell(messages.Begin())]

    def tell(self, *events: Event) -> list[LoopAction]:
        """Pass events to the state machine. Return the actions for the caller."""
        pending = deque(events)
        left: list[LoopAction] = []
        while pending and self._exit is None and self._member is not None:
            now = time.time_ns() + self.store.clock.offset_ns
            self._member, actions = step(self._member, pending.popleft(), now)
            for action in actions:
                if isinstance(action, messages.Exit):
                    left += self._begin_exit(action)
                elif isinstance(action, (messages.Start, messages.Stop, messages.Announce)):
                    if isinstance(action, messages.Start):
                        self._timers.arm(_LISTEN, _AFTER_START)
                    left.append(action)
                else:
                    pending.extend(self._do(action))
        self.store.follow(self.last_head)
        return left

    def poll(self) -> list[LoopAction]:
        """Process store events and expired timers without blocking. Return the actions for the caller."""
        left: list[LoopAction] = []
        if self._member is None:
            return left
        self._pauses.look()
        for event in drop_stale(self.store.take(), self._member.keys.head):
            if isinstance(event, Notice):
                left.append(messages.Announce(event.message))
            elif isinstance(event, ConnectionLost):
                self._lose_calls()
                left += self.tell(ConnectionLost(event.kind, self._pauses.explain(event.message)))
            elif not self._is_of_calls(event):
                left += self.tell(event)
        for name in self._timers.take_due():
            if name == _PORT:
                left += self._take_port_back()
            elif name == _LISTEN:
                self.calls.listen(_CALLS)
            elif self._calls is None or not self._calls.expire(name):
                left += self._farewell(name) or self.tell(messages.TimerFired(name))
        if self._calls is not None:
            left += map(messages.Announce, self._calls.take_troubles())
        return left

    def _is_of_calls(self, event: StoreEvent) -> bool:
        """Handle the parts of an event of the store that do not concern the rendezvous: names of nodes, and
        messages of other agents (:mod:`.calls`). Return true if the event has only such messages.
        """
        if isinstance(event, Reply):
            if event.tag == _NAMES:
                self._take_names(event)
            elif event.tag == _CALLS:
                self.calls.take(event.entries())
            elif event.tag == _CLAIM:
                self._end_claim(is_ok=event.ok)
            elif (exchange := self._exchanges.get(event.tag)) is not None:
                exchange.take_reply(event)
        elif isinstance(event, Changes):
            rest = list(event.changes)
            if self._exchanges and self._member is not None:
                for exchange in self._exchanges.values():
                    exchange.take(rest)
                exchanges = self._member.keys.exchanges
                rest = [each for each in rest if not each.key.startswith(exchanges)]
            if self._calls is not None:
                rest = self._calls.take(rest)
            return len(rest) < len(event.changes) and not rest
        return False

    def _lose_calls(self) -> None:
        self._end_claim(is_ok=None)
        for exchange in self._exchanges.values():
            exchange.lose()
        self._exchanges.clear()
        if self._calls is not None:
            self._calls.lost()

    def _take_names(self, reply: Reply) -> None:
        (table,), member, head = reply.results, self._member, self.last_head
        if isinstance(table, Sequence) and member is not None and head is not None:
            self._names = names_of(table, member.keys.table(head.form), head.size)

    def worker_gone(self, name: str) -> None:
        """Delete the registration of a worker whose processes have exited, so that other workers notice."""
        keys = workers_keys(self._rendezvous, self.store.job, self.job_number)
        # Use tag 0, because the state machine never uses it and therefore ignores the reply.
        self.store.send(Txn(0, [], keys.forget_process(name)))

    @property
    def agent(self) -> str:
        """Name of this agent. The names of its registrations begin with it."""
        assert self._member is not None
        return self._member.agent.agent

    def seconds_left(self, limit: float) -> float:
        left = self._timers.seconds_left(limit)
        self._pauses.wait(left)
        return left

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors that are readable when :meth:`poll` has work."""
        fd = self.store.fd
        return () if fd is None else (fd,)

    def lose(self, why: str) -> list[LoopAction]:
        """Close the connection to the store, if it is open, and report its loss to the state machine."""
        if self.store.fd is None:
            return []
        self.store.disconnect()
        self._lose_calls()
        return self.tell(ConnectionLost("silent", self._pauses.explain(why)))

    # --- the port shared with the workers ---

    def open_store(self) -> str | None:
        """Serve the workers' store on the listener that this agent has announced, unless rank 0 serves the
        store. With ``static``, lend the port to the workers instead. Return an error message if that fails.
        """
        if not self._rendezvous.is_static:
            if self._store_port is not None:
                self._store_port.serve(self._supervisor)
            self.store.announce_workers_store(self.agent, self.last_head)
            return None
        self._timers.disarm(_PORT)
        if self._port.lend():
            return None
        where = f"port {self._rendezvous.port} for the workers' store"
        return f"{where} is taken by another program: {self._port.trouble}"

    def group_over(self, event: Event) -> list[LoopAction]:
        """Report to the state machine with ``event`` that all worker processes have exited. With the back end
        ``static``, first take the rendezvous store's port back, which the workers have used. Until that
        succeeds, hold back any event that leads to the next round.
        """
        if self._port.take_back():
            return self.tell(event)
        self._is_told = False
        self._timers.arm(_PORT, self._port.pause)
        if isinstance(event, messages.WorkersDone):
            return self.tell(event)
        self._held_back = event
        return []

    def _take_port_back(self) -> list[LoopAction]:
        left: list[LoopAction] = []
        is_back = self._port.take_back()
        if not is_back:
            self._timers.arm(_PORT, self._port.pause)
            if not self._port.is_overdue:
                return left
            if not self._is_told:
                self._is_told = True
                text = (
                    f"port {self._rendezvous.port} is still taken {PORT_PATIENCE:g} s after the workers have "
                    f"ended ({self._port.trouble}): no node can join until it is free"
                )
                left.append(messages.Announce(text))
        held, self._held_back = self._held_back, None
        return left if held is None else left + self.tell(held)

    # --- exit ---

    def _begin_exit(self, action: messages.Exit) -> list[LoopAction]:
        self._exit = action
        if self._stays or not self.store.is_needed():
            return [action]
        self._timers = Timers()
        self._timers.arm(_FAREWELL, self._rendezvous.settings.close_timeout)
        self._timers.arm(_FAREWELL_TICK, _TICK)
        return []

    def _farewell(self, name: str) -> list[LoopAction]:
        if self._exit is None:
            return []
        if name == _FAREWELL or not self.store.is_needed():
            self._timers = Timers()
            return [self._exit]
        self._timers.arm(_FAREWELL_TICK, _TICK)
        return []

    def hasten(self) -> list[LoopAction]:
        """Handle a repeated stop request: do not wait any longer for other agents or for the store."""
        return self.tell(messages.TimerFired("leave")) or self._farewell(_FAREWELL)

    def close(self) -> None:
        self._close_store()
        self.store.close(stays=self._stays)

    @property
    def _stays(self) -> bool:
        """True if the store stays open after this job, so that other agents can still read its outcome."""
        is_success = self._exit is not None and self._exit.outcome.kind in {"succeeded", "spare"}
        return is_success and self.store.may_stay

    # --- executing actions ---

    def _do(self, action: Action) -> Sequence[Event]:
        match action:
            case Txn() | Watch() | Unwatch():
                self.store.send(action)
            case messages.Arm():
                self._timers.arm(action.name, action.seconds)
            case messages.Disarm():
                self._timers.disarm(action.name)
            case messages.Connect():
                return self._connect()
            case messages.Disconnect():
                self._lose_calls()
                self.store.disconnect()
            case messages.BindStore():
                return self._bind_store()
            case messages.CloseStore():
                self._close_store()
        return ()

    def _connect(self) -> Sequence[Event]:
        if self._names is None:
            self._asked_form = ""
        was_host = self.store.hosts
        has_part = self._member is not None and self._member.joining.has_seen_round
        lost = self.store.connect(same=has_part)
        if lost is not None:
            return (lost,)
        if self.store.hosts and not was_host:
            return (messages.StoreHosted(self.store.fallback_addr, self.store.why_hosts),)
        return ()

    def _bind_store(self) -> Sequence[Event]:
        self._close_store()
        ports = self._rendezvous.settings.worker_port_range
        try:
            self._store_port = StorePort(ports, is_served=self._use_agent_store)
        except OSError as error:
            return (messages.StorePortFailed(f"no port for the workers' store: {error}"),)
        return (messages.StorePort(self._store_port.number),)

    def _close_store(self) -> None:
        if self._store_port is not None:
            self._store_port.close()
            self._store_port = None


def names_of(table: Iterable[Entry], prefix: str, size: int) -> list[str] | None:
    """Return the node names in a round's table of members, ordered by group rank. The table's keys begin with
    ``prefix``. Return ``None`` if the table is damaged or does not have ``size`` names, for example because
    it was deleted.
    """
    parts: dict[int, bytes] = {}
    for entry in table:
        index = number_of(entry.key.removeprefix(prefix))
        if index is not None:
            parts[index] = entry.value or b""
    try:
        names = [seat.name for index in sorted(parts) for seat in table_of(parts[index])]
    except DamagedError:
        return None
    return names if len(names) == size else None


def drop_stale(events: list[StoreEvent], head: str) -> list[StoreEvent]:
    """Drop outdated events: if the last event is the loss of the connection, earlier ones could start workers
    although this agent's lease may have expired. Keep changes of the key ``head`` (state of the job) that
    close the job, because the store's host may exit before this agent can read the key again.
    """
    if not events or not isinstance(events[-1], ConnectionLost):
        return events
    return [*(event for event in events[:-1] if _ends_the_job(event, head)), events[-1]]


def _ends_the_job(event: StoreEvent, head: str) -> bool:
    changes = event.changes if isinstance(event, Changes) else ()
    last = next((change for change in reversed(changes) if change.key == head), None)
    return last is not None and last.value is not None and Head.read(last).state == "CLOSED"
