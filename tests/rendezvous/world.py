"""A simulated cluster around the shipped step function, with agents, workers, timeouts and every kind of
fault.

A schedule is a list of choices. In the first part faults happen; then everything is delivered, nothing
fails any more, and what the job has come to is judged.
"""

from __future__ import annotations

import zlib
from typing import Any

from elasticrs._engine.job.value import Record, fresh
from elasticrs._engine.nodes.protocol import messages as m
from elasticrs._engine.nodes.protocol.machine import Member, Phase, step
from elasticrs._engine.nodes.transport.coordination import Connected, ConnectionLost, Txn, Unwatch, Watch

from . import agents
from .checks import COMMAND, OTHER_COMMAND, Checks, ViolationError, require
from .outages import Outages
from .store import Conn, Store

HARD = ("join", "give_up", "connect", "store_lost", "leave", "barrier", "round_age")
"""Timers that end something: in the fair part they fire only when nothing else can happen."""

NEW_WORLDS = {
    "server_dies": 0.08,
    "mismatch": 0.05,
    "stuck": 0.03,
    "embedded": 0.35,
    "flaky": 0.15,
    "etcd": 0.5,
    "kept": 0.5,
    "calm": 0.06,
}
STATIC = 0.1, 0.3
"""Where the number drawn for flaky makes ranks be given by hand: some are both."""

FIXED_PORT = 29500

EPOCH = 10**18
CLOCK_STEPS = 20
"""How many lines of the log pass between two steps of a clock."""


class Group(Record):
    """The workers of one node."""

    round: int
    rank: int
    conn: Conn
    stopping: bool = False
    peer_lost: bool = False
    result: tuple[Any, ...] | None = None
    is_stuck: bool = False
    failed_at: int | None = None


class Proc(Record):
    """One agent process."""

    name: str
    member: Member
    alive: bool = True
    paused: bool = False
    conn: Conn | None = None
    connecting: bool = False
    is_lost: bool = False
    queue: list[Any] = fresh(factory=list)
    timers: set[str] = fresh(factory=set)
    group: Group | None = None
    port: int | None = None
    served: set[int] = fresh(factory=set)
    outcome: m.Outcome | None = None
    leaving: bool = False


class World(Outages):
    """The simulated cluster, and the events that can happen next."""

    def __init__(self, pick, random, *, clocks_agree=False, asks=False, delay=0.0, unfit=0.0):
        """``pick(weights)`` chooses an index, and ``random()`` returns a number below 1 for the setup.
        ``delay`` is the delay of restarts in seconds, and ``unfit`` the probability that a check finds a node
        unfit.
        """
        self.pick, self.random = pick, random
        self.clocks_agree = clocks_agree
        self.asks = asks
        self.unfit = unfit
        most = 1 + int(random() * 4)
        least = 1 + int(random() * most)
        self.config = {
            "min_nodes": least,
            "max_nodes": most,
            "max_restarts": int(random() * 3),
            "restart_delay": delay,
            "max_excluded_nodes": 2 if unfit else None,
            "scale_up": random() < 0.7,
            "restart_call_timeout": 1.0 if random() < 0.2 else 0.0,
            "max_node_losses": int(random() * 3) if random() < 0.1 else None,
            "max_short_losses": 2 + int(random() * 2) if random() < 0.15 else 10,
        }
        drawn = {name: random() for name in NEW_WORLDS}
        self.kinds = {name: drawn[name] < share for name, share in NEW_WORLDS.items()}
        self.kinds["embedded"] &= not self.kinds["etcd"] and not self.kinds["calm"]
        self.kinds["kept"] &= not self.kinds["etcd"] and not self.kinds["embedded"]
        self.kinds["static"] = STATIC[0] <= drawn["flaky"] < STATIC[1]
        self.kinds["kept"] &= not self.kinds["static"]
        if self.kinds["static"]:
            self.config["min_nodes"] = least = most
        self.log = []
        self.ports = 0
        self.clock = 0
        self.stats = {}
        self.server_alive = True
        self.procs = []
        self.checks = Checks(self)
        self.store = Store(self.checks.put, self.checks.ended, self.kinds["kept"])
        self.spawned = 0
        for _ in range(least + int(random() * (most + 2 - least))):
            self.spawn()

    # --- agents ---

    def spawn(self, **differs):
        self.spawned += 1
        name = f"n{self.spawned}"
        is_host = self.kinds["embedded"] and self.spawned == 1
        given = {"command": COMMAND, **self.config}
        if self.kinds["static"]:
            # A late node gets the rank of another one, as its replacement or by mistake.
            rank = (self.spawned - 1) % self.config["max_nodes"]
            given |= {"node_rank": rank, "order_hint": rank, "port": FIXED_PORT, "backend": "static"}
        member = agents.member(f"{self.spawned:02x}", name, hosts_store=is_host, **{**given, **differs})
        proc = Proc(name, member)
        self.procs.append(proc)
        self.deliver(proc, m.Begin())

    def count(self, what):
        self.stats[what] = self.stats.get(what, 0) + 1

    def deliver(self, proc, event):
        self.log.append((proc.name, event))
        _, actions = step(proc.member, event, self.clock_of(proc))
        for action in actions:
            self.act(proc, action)

    def clock_of(self, proc):
        """Return the time of the node's own clock, which is wrong by up to about an hour and is adjusted now
        and then.
        """
        if self.clocks_agree:
            return EPOCH + self.clock
        # Do not draw a random number for the error, because the schedule must be the same whatever the clocks
        # show.
        wrong_by = zlib.crc32(f"{proc.name} {len(self.log) // CLOCK_STEPS}".encode()) * 1000
        return EPOCH + self.clock + wrong_by

    def act(self, proc, action):
        self.log.append((proc.name, "->", action))
        require(proc.outcome is None, "an action after the exit", proc.name, action)
        ACTIONS[type(action)](self, proc, action)

    def _request(self, proc, action):
        require(proc.conn is not None, "a request without a connection", action)
        proc.conn.send(action)

    def _connect(self, proc, _):
        require(proc.conn is None and not proc.connecting, "two connections")
        proc.connecting = True

    def _disconnect(self, proc, _):
        proc.connecting = False
        if proc.conn is not None:
            proc.conn.is_revoked = True
        self.drop(proc)

    def drop(self, proc):
        """Drop the client's connection. Requests that were already sent may still reach the store."""
        if proc.conn is not None:
            proc.conn.forget()
            proc.conn = None

    def _start(self, proc, action):
        self.checks.start(proc, action)
        proc.group = Group(action.round, action.group_rank, proc.conn)
        if action.serves_store:
            proc.served.add(proc.port)
        proc.group.peer_lost = self.checks.is_member_missing(action.round)
        self.count("starts")

    def _stop(self, proc, action):
        require(not (self.kinds["calm"] and action.fenced), "fenced for nothing", proc.name, action)
        # The group may have ended already, with the event still on its way to the agent.
        if proc.group is not None:
            require(proc.group.round == action.round, "stops what it does not have", action)
            proc.group.stopping = True

    def _bind(self, proc, _):
        self.ports += 1
        proc.port = self.ports
        proc.queue.append(m.StorePort(self.ports))

    def _close_store(self, proc, _):
        proc.port = None

    def _arm(self, proc, action):
        proc.timers.add(action.name)

    def _disarm(self, proc, action):
        proc.timers.discard(action.name)

    def _announce(self, _, action):
        require(len(action.text) < 2000, "a long line", action.text)

    def _exit(self, proc, action):
        proc.outcome = action.outcome
        self.checks.exit(proc, action.outcome)
        self.count("exit_" + action.outcome.kind)
        if proc.member.leaving is None or not proc.member.leaving.is_known:
            self.checks.losses += 1
        proc.alive = False
        proc.connecting = False
        head = self.checks.head
        is_over = head is not None and head.state == "CLOSED"
        if self.is_host(proc) and not is_over:
            self.kill_server()

    def is_other(self, proc):
        """Return true if this agent belongs to another job."""
        differs = proc.member.agent.policy.max_restarts != self.config["max_restarts"]
        return differs or proc.member.rendezvous.command != COMMAND

    def is_host(self, proc):
        return self.kinds["embedded"] and proc.name == "n1"

    # --- faults ---

    def lose_connection(self, proc, kind="closed"):
        """Report to the agent that its connection is lost. A paused agent learns of it when it resumes."""
        self.drop(proc)
        self.mark_peers(proc)
        if not proc.is_lost:
            proc.is_lost = True
            proc.queue.insert(0, ConnectionLost(kind, "connection lost"))

    def mark_peers(self, proc):
        """Mark the workers of the other nodes to fail, because this node's workers are lost."""
        number = None
        if proc.group is not None:
            number = proc.group.round
        elif proc.member.phase is Phase.DONE and proc.member.link.slot.group_rank == 0:
            number = proc.member.finished_round
        if number is None:
            return
        for other in self.procs:
            group = other.group
            is_peer = other is not proc and other.alive and group is not None and group.round == number
            if is_peer and not group.stopping:
                group.peer_lost = True

    def crash(self, proc):
        """Kill the agent. Its workers are killed soon after."""
        self.mark_peers(proc)
        self.checks.losses += 1
        proc.alive = proc.paused = proc.connecting = False
        if proc.conn is not None:
            self.store.breaks(proc.conn)
        self.drop(proc)
        if self.is_host(proc):
            self.kill_server()

    # --- choices ---

    def choices(self, faults):
        """Return the events that can happen next, as tuples of weight, function and arguments."""
        found = []
        add = found.append
        silent = (self.server_alive or self.returns) and self.has_dead_lease()
        self._outages(add, faults)
        for proc in self.procs:
            if proc.alive:
                self._choices_of(proc, add, faults, silent)
            elif proc.group is not None:
                add((4, self.sweep, proc))
        if faults and not self.kinds["calm"]:
            self._faults(add)
        return found

    def _choices_of(self, proc, add, faults, silent):
        group = proc.group
        if group is not None:
            if group.stopping:
                add((2, self.stopped, proc))
            elif group.result is None:
                if group.peer_lost:
                    add((4, self.worker_failed, proc))
                else:
                    add((0.35 if faults else 1, self.worker_done, proc))
                    if faults and not self.kinds["calm"]:
                        add((0.25, self.worker_failed, proc))
                        add((0.06, self.start_failed, proc))
        if proc.paused:
            add((0.7 if faults else 5, self.resume, proc))
            return
        if proc.queue:
            add((6, self.from_queue, proc))
            if proc.is_lost:
                # Deliver only the loss of the connection, because fencing comes first.
                return
        if proc.connecting:
            add((3, self.connect, proc))
        conn = proc.conn
        if conn is not None and not (conn.is_stalled and conn.is_etcd):
            for queue in filter(None, conn.queues):
                add((6, self.changes, proc, queue))
            if conn.replies:
                add((6, self.reply, proc))
        for name in sorted(proc.timers):
            kind = name.partition("/")[0]
            if kind == "settle" and (silent or self.is_stopping(faults)):
                # The settle time is longer than any lease and than the workers' grace period, so it cannot
                # elapse yet.
                continue
            if kind == "rank" and silent:
                # The wait for a rank is longer than any lease, so it cannot elapse yet.
                continue
            if kind in ("waiting", "connect_news") or (kind == "reconnect" and not self.server_alive):
                # These timers repeat. In the fair part, they change nothing, so do not let them fire.
                if faults:
                    add((0.1, self.timer, proc, name))
            elif kind not in HARD:
                # Make this timer likely to fire while the store is away, because that case is worth testing.
                is_away = kind == "settle" and any(each.is_stalled and each.open for each in self.store.conns)
                add((5 if is_away else 0.5, self.timer, proc, name))
            elif faults and not self.kinds["calm"]:
                add((HARD_WEIGHTS.get(kind, 0.02), self.timer, proc, name))
            else:
                add((0, self.timer, proc, name))

    def _faults(self, add):
        for proc in self.procs:
            if not proc.alive:
                continue
            add((0.12, self.fault_crash, proc))
            add((0.015, self.fault_leave, proc))
            if self.asks:
                add((1, self.ask_for_round, proc))
            if proc.conn is not None:
                add((0.8 if self.kinds["flaky"] else 0.06, self.fault_cut, proc))
            if proc.connecting:
                add((0.3, self.fault_refused, proc))
            if not proc.paused:
                add((0.08, self.fault_pause, proc))
        if self.spawned < 9:
            add((0.25, self.fault_spawn))
        if self.kinds["stuck"]:
            add((0.2, self.fault_stuck))

    def is_stopping(self, faults):
        """Return true if workers are about to exit or an agent is about to leave."""
        if any(proc.alive and proc.leaving for proc in self.procs):
            return True
        return not faults and any(
            proc.alive and proc.group is not None and proc.group.stopping for proc in self.procs
        )

    # --- what happens ---

    def from_queue(self, proc):
        event = proc.queue.pop(0)
        if isinstance(event, ConnectionLost):
            proc.is_lost = False
            proc.connecting = False
        self.deliver(proc, event)

    def connect(self, proc):
        proc.connecting = False
        if not self.server_alive:
            self.deliver(proc, ConnectionLost("refused", "connection refused"))
            return
        self.sync()
        proc.conn = Conn(proc.name, self.kinds["etcd"], proc)
        self.store.conns.append(proc.conn)
        self.deliver(proc, Connected(self.store.revision, f"10.0.0.{proc.name[1:]}"))

    def changes(self, proc, queue):
        self.tell(proc, queue)
        self.checks.told(proc)

    def reply(self, proc):
        self.tell(proc, proc.conn.replies)

    def tell(self, proc, queue):
        event = queue.pop(0)
        require(event.revision <= self.store.revision, "the store goes back", proc.name, event)
        proc.conn.received(event)
        self.deliver(proc, event)

    def timer(self, proc, name):
        proc.timers.discard(name)
        self.deliver(proc, m.TimerFired(name))

    def stopped(self, proc):
        group, proc.group = proc.group, None
        if group.result is not None and group.result[0] == "done":
            event = m.WorkersDone()
            self.checks.finished(group)
        else:
            cause = self.checks.cause_of(proc, group)
            unfit = "the check failed" if self.unfit and self.random() < self.unfit else None
            # Evidence about a hang that the leader cannot decode.
            evidence = b"damaged" if group.round % 2 else None
            event = m.GroupEnded(cause, "workers 1 are left" if group.is_stuck else None, evidence, unfit)
        # Drop an exit that the agent has not handled yet, because this event includes it.
        proc.queue = [each for each in proc.queue if not isinstance(each, (m.WorkersDone, m.WorkerFailed))]
        proc.queue.append(event)

    def worker_done(self, proc):
        proc.group.result = ("done",)
        self.clock += 1000
        if not proc.group.stopping:
            self.checks.finished(proc.group)
            proc.group.stopping = True
            proc.queue.append(m.WorkersDone())
            proc.group = None
            self.count("worker_done")

    def worker_failed(self, proc):
        group = proc.group
        self.clock += 1000
        group.result = ("failed", group.peer_lost, self.clock)
        cause = self.checks.failed(proc, group)
        proc.queue.append(m.WorkerFailed(cause))
        self.count("worker_failed_induced" if group.peer_lost else "worker_failed")

    def start_failed(self, proc):
        self.clock += 1000
        self.checks.start_failed(proc.group)
        proc.group = None
        proc.queue.append(m.StartFailed("no memory", self.random() < 0.8))
        self.count("start_failed")

    def resume(self, proc):
        proc.paused = False

    def fault_crash(self, proc):
        self.count("crash")
        self.log.append(("crash", proc.name))
        self.crash(proc)

    def fault_cut(self, proc):
        self.count("cut")
        self.checks.losses += 1
        self.log.append(("cut", proc.name))
        proc.conn.is_refused = True
        self.lose_connection(proc)

    def fault_refused(self, proc):
        self.count("refused")
        proc.connecting = False
        # The port may belong to the workers of rank 0.
        kind = "not_ours" if self.kinds["static"] and self.random() < 0.5 else "refused"
        self.deliver(proc, ConnectionLost(kind, "connection refused"))

    def fault_pause(self, proc):
        self.count("pause")
        proc.paused = True
        self.log.append(("pause", proc.name))
        if self.random() < 0.6 and proc.conn is not None:
            if proc.conn.is_etcd:
                self.give_up(proc)
            elif not proc.conn.is_stalled:
                self.break_off(proc.conn)

    def fault_leave(self, proc):
        if proc.leaving or proc.paused:
            return
        self.count("leave")
        proc.leaving = True
        self.mark_peers(proc)
        close = self.is_host(proc) or self.random() < 0.2
        proc.queue.append(m.Leave("SIGTERM", close))

    def ask_for_round(self, proc):
        if not proc.paused:
            self.count("asked")
            self.checks.asked = True
            proc.queue.append(m.AskForRound("a checkpoint"))

    def fault_spawn(self):
        if self.kinds["mismatch"] and (chance := self.random()) < 0.5:
            other = {"max_restarts": self.config["max_restarts"] + 1}
            self.spawn(**(other if chance < 0.25 else {"command": OTHER_COMMAND}))
        else:
            self.spawn()

    def fault_stuck(self):
        for proc in self.procs:
            if proc.group is not None and proc.group.stopping:
                proc.group.is_stuck = True
                self.checks.losses += 1
                self.count("stuck")
                return

    # --- a whole schedule ---

    def run(self, steps):
        for _ in range(steps):
            found = self.choices(True)
            if not found:
                break
            self.do(found[self.pick([each[0] for each in found])])
            if not any(proc.alive for proc in self.procs):
                return
        self.fair()

    def do(self, choice):
        choice[1](*choice[2:])

    def fair(self):
        for _ in range(4000):
            found = self.choices(False)
            soft = [each for each in found if each[0] and each[1] != self.worker_done]
            if soft:
                self.do(soft[self.pick([each[0] for each in soft])])
                continue
            self.checks.quiescent()
            if not any(proc.alive for proc in self.procs):
                return
            done = [each for each in found if each[1] == self.worker_done]
            hard = [each for each in found if not each[0]]
            if done:
                self.do(done[self.pick([1] * len(done))])
            elif hard:
                hard.sort(key=lambda each: HARD.index(each[3].partition("/")[0]))
                self.do(hard[0])
            else:
                raise ViolationError(
                    "stuck", [(proc.name, proc.member.phase) for proc in self.procs if proc.alive]
                )
        raise ViolationError("the fair part does not end")


HARD_WEIGHTS = {"join": 0.1, "barrier": 0.1, "round_age": 0.1}

ACTIONS = {
    Txn: World._request,
    Watch: World._request,
    Unwatch: World._request,
    m.Connect: World._connect,
    m.Disconnect: World._disconnect,
    m.Start: World._start,
    m.Stop: World._stop,
    m.BindStore: World._bind,
    m.CloseStore: World._close_store,
    m.Arm: World._arm,
    m.Disarm: World._disarm,
    m.Announce: World._announce,
    m.Exit: World._exit,
}
