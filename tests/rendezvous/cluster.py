"""A few agents on a simulated store. Events are delivered at once and in order, and the test controls the
clock.
"""

from helpers.said import says

from elasticrs._engine.nodes.protocol import messages as m
from elasticrs._engine.nodes.protocol.machine import step
from elasticrs._engine.nodes.protocol.records import Head, Keys
from elasticrs._engine.nodes.transport.coordination import Connected, ConnectionLost, Txn, Unwatch, Watch

from . import agents
from .store import Conn, Store

NOW = 1_700_000_000_000_000_000


class Agent:
    """One agent, and the actions that its state machine has requested."""

    def __init__(self, cluster, member):
        self.cluster = cluster
        self.name = member.agent.node
        self.member = member
        self.conn = None
        self.address = f"10.0.0.{len(cluster.agents) + 1}"
        self.actions = []
        self.timers = {}
        self.ports = 0
        self.refuses = None

    def send(self, event):
        _, actions = step(self.member, event, self.cluster.now)
        self.actions += actions
        for action in actions:
            self.act(action)
        self.cluster.run()

    def act(self, action):
        if isinstance(action, (Txn, Watch, Unwatch)):
            self.conn.requests.append(action)
        elif isinstance(action, m.Arm):
            self.timers[action.name] = action.seconds
        elif isinstance(action, m.Disarm):
            self.timers.pop(action.name, None)
        elif isinstance(action, (m.Disconnect, m.Exit)):
            self.disconnect()
        elif isinstance(action, m.Connect):
            self.cluster.later.append((self, self._connect))
        elif isinstance(action, m.BindStore):
            self.ports += 1
            self.cluster.later.append((self, self._bound))

    def _bound(self):
        return m.StorePort(1000 * int(self.member.agent.agent, 16) + self.ports)

    def _connect(self):
        if self.refuses is not None:
            return ConnectionLost(*self.refuses)
        self.conn = Conn(self.name)
        self.cluster.store.conns.append(self.conn)
        return Connected(self.cluster.store.revision, self.address)

    def disconnect(self):
        if self.conn is not None:
            self.conn.forget()
            self.cluster.store.end_session(self.conn)
            self.conn = None

    def lose(self, kind="closed", message="connection reset"):
        self.disconnect()
        self.send(ConnectionLost(kind, message))

    def kill(self):
        """Kill the agent. Its nursery (the process that forks workers) closes the connection."""
        self.cluster.agents.remove(self)
        self.disconnect()
        self.cluster.run()

    def fire(self, name):
        del self.timers[name]
        self.send(m.TimerFired(name))

    def fail(self, time_ns=1, message="boom", end=True, **more):
        self.send(m.WorkerFailed({"node": self.name, "time_ns": time_ns, "message": message, **more}))
        if end:
            self.send(m.GroupEnded())

    @property
    def key(self):
        """Key of the agent's registration in the store."""
        return self.cluster.keys.node(self.member.link.member)

    def all(self, kind):
        return [action for action in self.actions if isinstance(action, kind)]

    @property
    def starts(self):
        return self.all(m.Start)

    @property
    def outcome(self):
        exits = self.all(m.Exit)
        assert len(exits) <= 1
        return exits[0].outcome if exits else None

    @property
    def texts(self):
        return [action.text for action in self.all(m.Announce)]


class Cluster:
    """Agents with common settings, and their store."""

    def __init__(self, **settings):
        self.settings = settings
        self.now = NOW
        self.agents = []
        self.later = []
        self.keys = Keys("job")
        self.store = Store(lambda *_: None)
        self._running = False

    def add(self, name, begin=None, local_address=None, machine=None, **differs):
        number = f"{len(self.store.conns) + 1:02x}"
        agent = Agent(self, agents.member(number, name, **{**self.settings, **differs}))
        if machine is not None:
            agent.member.agent = agent.member.agent.replaced(host=machine)
        agent.address = local_address or agent.address
        self.agents.append(agent)
        if begin is not None:
            agent.send(begin)
        agent.send(m.Begin())
        return agent

    def run(self):
        """Deliver all pending events. Changes come before replies, as on a single connection."""
        if self._running:
            return
        self._running = True
        try:
            while self._turn():
                pass
        finally:
            self._running = False

    def _turn(self):
        if self.later:
            agent, event = self.later.pop(0)
            agent.send(event())
            return True
        for agent in list(self.agents):
            conn = agent.conn
            if conn is None:
                continue
            queue = next(filter(None, conn.queues), None)
            if queue is not None:
                agent.send(queue.pop(0))
                return True
            if conn.replies:
                agent.send(conn.replies.pop(0))
                return True
            if conn.requests:
                self.store.serve(conn)
                return True
        return False

    @property
    def head(self):
        entry = self.store.get(self.keys.head)
        return None if entry is None else Head.decode(entry.value)


def ends(outcome, kind, *tokens):
    """Assert that an agent ended with this kind of outcome, and that its message contains these texts."""
    assert outcome.kind == kind, outcome
    says(outcome.message, *tokens)


def end_all(agents):
    """Report the end of all workers that are still running."""
    for agent in agents:
        if agent.member.workers is not None:
            agent.send(m.GroupEnded())


def joined(count, needs, **settings):
    """Return a cluster, and the agents that have joined it. ``needs`` is the number of nodes of a round, or
    its minimum and its maximum.
    """
    low, high = needs if isinstance(needs, tuple) else (needs, needs)
    cluster = Cluster(**{"min_nodes": low, "max_nodes": high, **settings})
    return cluster, [cluster.add("abcdefgh"[index]) for index in range(count)]


def running(count=2, **settings):
    """Return a cluster, and its agents, which all run the first round."""
    return joined(count, needs=count, **settings)
