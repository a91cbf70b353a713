"""Lightweight agents, many of them in one thread.

Each has a real connection and the shipped decisions. Its workers are imitated: they start and end at once.
"""

import heapq
import json
import select
import sys
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from benchmarks.scale.children import Lines, write_line
from benchmarks.scale.server import raise_descriptors
from elasticrs import _core
from elasticrs._engine.job.restart_policy import RestartSettings
from elasticrs._engine.nodes.protocol import machine, messages
from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous, ThisAgent
from elasticrs._engine.nodes.transport.coordination import NativeSession, Put, Reply, Txn, Unwatch, Watch
from elasticrs._engine.nodes.transport.etcd_site import EtcdSite
from elasticrs._engine.nodes.transport.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable


RUN_ID = "scale"
LOOK = 0.002
"""Seconds between two looks at which store has been met."""

CAUSE = {
    "node": "node7",
    "host": "node7",
    "group_rank": 7,
    "rank": 7,
    "local_rank": 0,
    "pid": 4711,
    "exitcode": 1,
    "message": "RuntimeError: the loss is not a number any more",
    "lines": [f'  File "train.py", line {number}, in step' for number in range(12)],
    "error_ns": 100_000,
}


class Agent:
    """One agent.

    Args:
        swarm: it belongs to.
        number: of all agents.
        agents: how many there are in all.
    """

    __slots__ = (
        "_events",
        "_handlers",
        "_swarm",
        "_timers",
        "confirmed",
        "member",
        "registering",
        "round",
        "session",
    )

    def __init__(self, swarm: "Swarm", number: int, agents: int) -> None:
        rendezvous = Rendezvous(
            "c10d",
            "127.0.0.1",
            swarm.port,
            run_id=RUN_ID,
            # Two agents may be disconnected later, and the others must continue.
            min_nodes=max(1, agents - 2),
            max_nodes=agents,
            settings=Settings({"last_call_timeout": 3600.0}),
        )
        node = f"node{number}"
        this_agent = ThisAgent(
            RUN_ID, f"{number:016x}", node, node, "default", 1, RestartSettings(1000), False, None
        )
        self._swarm = swarm
        self._events: deque[Any] = deque()
        self._timers: dict[str, float] = {}
        self.member = machine.Member(rendezvous, this_agent)
        self.session: NativeSession | None = None
        self.confirmed: bytes | None = None
        self.registering = -1
        self.round = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            Txn: self._txn,
            Watch: self._send,
            Unwatch: self._send,
            messages.Connect: self._connect,
            messages.Disconnect: self._disconnect,
            messages.Start: self._start,
            messages.Stop: self._stop,
            messages.BindStore: self._bind_store,
            messages.CloseStore: self._nothing,
            messages.Arm: self._arm,
            messages.Disarm: self._disarm,
            messages.Announce: self._announce,
            messages.Exit: self._exit,
        }

    def handle(self, event: Any) -> None:
        """Handle an event, and the events with which the imitated workers respond."""
        events = self._events
        events.append(event)
        while events:
            self.member, actions = machine.step(self.member, events.popleft(), time.time_ns())
            for action in actions:
                self._handlers[type(action)](action)

    def ready(self) -> None:
        """Handle the events that have arrived on the connection."""
        if self.session is None:
            return
        for event in self.session.take():
            self._swarm.down += 1
            if type(event) is Reply and event.tag == self.registering and event.ok:
                self.registering = -1
                self._swarm.stamp("registered", 0)
            self.handle(event)

    def fire(self, name: str, due: float) -> None:
        """Handle a timer that is due, unless it was reset or cancelled in the meantime."""
        if self._timers.get(name) == due:
            del self._timers[name]
            self.handle(messages.TimerFired(name))

    def confirm(self) -> bool:
        """Return true if the store has changed since the last call that returned true."""
        met = None if self.session is None else self.session.met
        if met is None or met[0] == self.confirmed:
            return False
        self.confirmed = met[0]
        return True

    def close(self) -> None:
        """Close the connection, as if the agent had been killed."""
        self._disconnect(None)

    def _connect(self, _: Any) -> None:
        swarm = self._swarm
        if swarm.site is not None:
            client = swarm.site.client(RUN_ID, connect_timeout=60.0, links=(RUN_ID, None))
        else:
            client = _core.CoordinationClient("127.0.0.1", swarm.port, run_id=RUN_ID, resume=True)
        self.session = NativeSession(client)
        swarm.register(client.fd, self)

    def _disconnect(self, _: Any) -> None:
        if self.session is not None:
            self._swarm.forget(self.session.fd)
            self.session.close()
            self.session = None

    def _txn(self, txn: Any) -> None:
        link = self.member.link
        if link is not None and link.member:
            own = self.member.keys.node(link.member)
            if any(isinstance(op, Put) and op.leased and op.key == own for op in txn.then):
                self.registering = txn.tag if self.round == 0 else -1
        self._send(txn)

    def _send(self, request: Any) -> None:
        if self.session is not None:
            self._swarm.up += 1
            self.session.send(request)

    def _start(self, start: Any) -> None:
        self.round = start.round
        self._swarm.stamp("started", start.round)

    def _stop(self, stop: Any) -> None:
        self._swarm.stops += 1
        self._swarm.stamp("stopped", stop.round)
        self._events.append(messages.GroupEnded())

    def _bind_store(self, _: Any) -> None:
        self._events.append(messages.StorePort(29500))

    def _nothing(self, _: Any) -> None:
        """Do nothing, because there is nothing to close."""

    def _announce(self, announce: Any) -> None:
        self._swarm.texts[announce.text] += 1

    def _arm(self, arm: Any) -> None:
        due = time.monotonic() + arm.seconds
        self._timers[arm.name] = due
        heapq.heappush(self._swarm.timers, (due, id(self), self, arm.name))

    def _disarm(self, disarm: Any) -> None:
        self._timers.pop(disarm.name, None)

    def _exit(self, exit_: Any) -> None:
        self._swarm.texts[f"{exit_.outcome.kind}: {exit_.outcome.message}"] += 1
        self._swarm.stamp("exited", 0)
        self._disconnect(None)


class Swarm:
    """Agents of this process.

    Args:
        port: of the store.
        first: number of the first of them.
        count: how many.
        agents: how many there are in all.
        store: ``own``, ``kept`` or ``etcd``.
    """

    def __init__(self, port: int, first: int, count: int, agents: int, store: str) -> None:
        self.port = port
        # Use a long TTL, because agents that share a thread may send keep-alives late.
        self.site = EtcdSite((("127.0.0.1", port),), ttl=60) if store == "etcd" else None
        self.up = 0
        self.down = 0
        self.stops = 0
        self.texts: Counter[str] = Counter()
        self.timers: list[tuple[float, int, Agent, str]] = []
        self.agents = [Agent(self, number, agents) for number in range(first, first + count)]
        self._by_fd: dict[int, Agent] = {}
        self._stamps: dict[tuple[str, int], list[int]] = {}
        self._awaited: tuple[str, int, int] | None = None
        self._epoll = select.epoll()

    def register(self, fd: int, agent: Agent) -> None:
        self._by_fd[fd] = agent
        self._epoll.register(fd, select.EPOLLIN)

    def forget(self, fd: int) -> None:
        self._epoll.unregister(fd)
        del self._by_fd[fd]

    def stamp(self, event: str, number: int) -> None:
        self._stamps.setdefault((event, number), []).append(time.monotonic_ns())

    def run(self) -> None:
        """Execute commands until the parent closes the pipe."""
        lines = Lines()
        self._epoll.register(lines.fd, select.EPOLLIN)
        while lines.is_open:
            timeout = max(0.0, self.timers[0][0] - time.monotonic()) if self.timers else None
            if self._awaited is not None and self._awaited[0] == "confirmed":
                timeout = LOOK
            for fd, _ in self._epoll.poll(timeout):
                if fd == lines.fd:
                    for command in lines.read():
                        self._obey(**command)
                elif (agent := self._by_fd.get(fd)) is not None:
                    agent.ready()
            now = time.monotonic()
            while self.timers and self.timers[0][0] <= now:
                due, _, agent, name = heapq.heappop(self.timers)
                agent.fire(name, due)
            self._tell()
        for agent in self.agents:
            agent.close()

    def _obey(
        self, do: str, agent: int | None = None, event: str = "", number: int = 0, count: int = 0
    ) -> None:
        if do == "await":
            self._awaited = event, number, count
            return
        if do == "counts":
            texts = dict(self.texts.most_common(5))
            write_line(1, {"up": self.up, "down": self.down, "stops": self.stops, "texts": texts})
            return
        chosen = self.agents if agent is None else [self.agents[agent]]
        moment = time.monotonic_ns()
        for each in chosen[:number] if do == "begin_some" else chosen:
            if do.startswith("begin"):
                each.handle(messages.Begin())
            elif do == "fail":
                each.handle(messages.WorkerFailed({**CAUSE, "time_ns": time.time_ns()}))
            elif do == "cut":
                each.close()
            elif each.session is not None:
                each.handle(messages.WorkersDone())
        write_line(1, moment)

    def _tell(self) -> None:
        if self._awaited is not None:
            event, number, count = self._awaited
            if event == "confirmed":
                for agent in self.agents:
                    if agent.confirm():
                        self.stamp(event, number)
            stamps = self._stamps.get((event, number), [])
            if len(stamps) >= count:
                self._awaited = None
                write_line(1, stamps)


def main() -> None:
    raise_descriptors()
    Swarm(**json.loads(sys.argv[1])).run()


if __name__ == "__main__":
    main()
