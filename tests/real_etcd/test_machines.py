"""Rendezvous of a few agents in one process on real etcd. The guarantees that the simulation checks also hold
with the shipped session, even while cluster members are killed, stopped and brought back.
"""

import random
import select
from collections import Counter
from functools import partial

import pytest
from helpers.procs import HANG
from rendezvous import agents

from elasticrs._engine.nodes.driver import Timers, now
from elasticrs._engine.nodes.protocol import messages as m
from elasticrs._engine.nodes.protocol.machine import step
from elasticrs._engine.nodes.protocol.records import Head
from elasticrs._engine.nodes.transport.coordination import (
    ConnectionLost,
    NativeSession,
    Notice,
    Txn,
    Unwatch,
    Watch,
)
from elasticrs._engine.nodes.transport.etcd_site import EtcdSite

PATIENT, QUICK = 20.0, 2.0
"""Seconds of a lease: longer than any election on a busy machine, and as short as can be."""

SETTINGS = {
    "min_nodes": 2,
    "max_nodes": 4,
    "max_restarts": 50,
    "max_short_losses": 1000,
    "last_call_timeout": 0.2,
    "scale_up_delay": 0.1,
    "join_timeout": 30.0,
    "store_lost_timeout": 30.0,
    "settle": 40.0,
}


def session(site, ttl):
    etcd = EtcdSite(tuple(site.server.endpoints), prefix=site.prefix, ttl=ttl, read_timeout=HANG)
    return NativeSession(etcd.client("job", connect_timeout=10.0))


class Agent:
    """A rendezvous state machine with its etcd session. A round number represents its workers."""

    def __init__(self, world, name):
        self.world, self.name = world, name
        self.member = agents.member(f"{len(world.agents) + 1:02x}", name, **SETTINGS)
        self.session, self.timers, self.ports = None, Timers(), 0
        self.round, self.outcome = None, None
        self.losses = []
        self.tell(m.Begin())

    def tell(self, event):
        if isinstance(event, ConnectionLost):
            self.losses.append(event.kind)
            self.disconnect()
        for action in step(self.member, event)[1]:
            self.do(action)

    def do(self, action):
        match action:
            case Txn() | Watch() | Unwatch():
                self.session.send(action)
            case m.Arm():
                self.timers.arm(action.name, action.seconds)
            case m.Disarm():
                self.timers.disarm(action.name)
            case m.Connect():
                self.session = session(self.world.site, self.world.ttl)
            case m.Disconnect():
                self.disconnect()
            case m.BindStore():
                self.ports += 1
                self.world.later.append((self, m.StorePort(self.ports)))
            case m.Start():
                assert self.round is None
                self.round = action.round
                self.world.started(self, action)
            case m.Stop():
                self.world.later.append((self, m.GroupEnded()))
            case m.Exit():
                self.outcome = action.outcome

    def end_workers(self, event):
        self.round = None
        self.tell(event)

    def disconnect(self):
        if self.session is not None:
            self.session.close()
            self.session = None

    def turn(self):
        while (session := self.session) is not None and (events := session.take()):
            for event in events:
                if self.session is session and not isinstance(event, Notice):
                    self.tell(event)
        for name in self.timers.take_due():
            self.tell(m.TimerFired(name))


class World:
    """Agents driven by a single thread, with checks of their rounds."""

    def __init__(self, site, count, ttl=PATIENT):
        self.site, self.ttl, self.agents, self.later = site, ttl, [], []
        self.places = {}
        for number in range(count):
            self.agents.append(Agent(self, f"n{number}"))

    def started(self, agent, start):
        ranks = self.places.setdefault(start.round, {})
        assert start.group_rank not in ranks, "one rank for two"
        ranks[start.group_rank] = agent.name
        assert not [each.name for each in self.agents if each.round not in (None, start.round)], "old workers"

    @property
    def live(self):
        return [agent for agent in self.agents if agent.outcome is None]

    @property
    def running(self):
        return [agent for agent in self.live if agent.round is not None]

    def until(self, is_so, seconds=HANG):
        """Drive all agents until the condition holds. Return false if it does not hold in time."""
        deadline = now() + seconds
        while not is_so():
            if now() > deadline:
                return False
            while self.later:
                agent, event = self.later.pop(0)
                if isinstance(event, m.GroupEnded):
                    agent.round = None
                agent.tell(event)
            for agent in self.live:
                agent.turn()
            poll = select.poll()
            for agent in self.live:
                if agent.session is not None:
                    poll.register(agent.session.fd, select.POLLIN)
            if not self.later:
                poll.poll(1000 * min([agent.timers.seconds_left(0.05) for agent in self.live], default=0))
        return True

    def runs(self, count):
        """Return true if ``count`` agents run the same round."""
        rounds = Counter(agent.round for agent in self.running)
        return rounds.most_common(1)[0][1] == count if rounds else False

    def runs_after(self, round_, count):
        """Return true if ``count`` agents run the same round, and it is later than this one."""
        return self.runs(count) and self.head().round > round_

    def head(self):
        return Head.decode(self.site.keys()["/elasticrs/job/head"])

    def close(self):
        for agent in self.agents:
            agent.disconnect()


@pytest.fixture
def world():
    made = []

    def make(site, count, **how):
        made.append(World(site, count, **how))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_finished_job_leaves_only_its_outcome_in_etcd(etcd, world):
    job = world(etcd, 4)
    assert job.until(lambda: job.runs(4))
    for agent in job.running:
        agent.end_workers(m.WorkersDone())
    assert job.until(lambda: not job.live)
    assert {agent.outcome.kind for agent in job.agents} == {"succeeded"}
    assert (job.head().state, job.head().outcome) == ("CLOSED", "succeeded")
    job.close()
    left = etcd.keys()
    assert not [key for key in left if "/nodes/" in key or "sessions" in key]
    late = world(etcd, 1)
    assert late.until(lambda: not late.live)
    assert late.agents[0].outcome.kind == "closed"


def fail(agent):
    """Report to the agent that its workers have failed and exited."""
    agent.tell(m.WorkerFailed({"node": agent.name, "time_ns": 1, "message": "boom"}))


def test_a_new_round_follows_each_failure_departure_and_arrival(etcd, world):
    job, chance = world(etcd, 3), random.Random(1)
    assert job.until(lambda: job.runs(3))
    for _ in range(20):
        before = job.head().round
        act = chance.choice(("fail", "fail", "leave", "lose", "come"))
        agent = chance.choice(job.running)
        if act == "fail":
            fail(agent)
        elif act == "leave" and len(job.live) > 2:
            agent.tell(m.Leave("SIGTERM"))
        elif act == "lose":
            # The agent comes back with a new incarnation number.
            agent.tell(ConnectionLost("closed", "reset"))
        elif len(job.live) < 4:
            job.agents.append(Agent(job, f"n{len(job.agents)}"))
        else:
            continue
        count = len(job.live) - (act == "leave" and agent.member.leaving is not None)
        assert job.until(partial(job.runs_after, before, count)), (act, agent.name)
    for agent in job.running:
        agent.end_workers(m.WorkersDone())
    assert job.until(lambda: not job.live)
    assert job.head().outcome == "succeeded"


def moments(chance, seconds):
    """Yield random pauses of up to half a second, until they add up to ``seconds``."""
    while seconds > 0:
        pause = 0.5 * chance.random()
        seconds -= pause
        yield pause


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_node_is_lost_while_etcd_members_fail_and_return(etcd_cluster, world):
    server, chance = etcd_cluster.server, random.Random(2)
    job = world(etcd_cluster, 4)
    assert job.until(lambda: job.runs(4))
    for pause in moments(chance, 3):
        job.until(lambda: False, pause)
        index = chance.randrange(3)
        chance.choice((server.kill, server.stop))(index)
        job.until(lambda: False, chance.choice((0.0, 0.3, 1.5)))
        # Bring the member back before the next one fails, because its log is incomplete until then.
        server.bring_back(index)
        server.wait_healthy(index)
    # Stop two members, so that quorum is lost for a while.
    for index in (0, 1):
        server.stop(index)
    job.until(lambda: False, 2.0)
    server.mend()
    assert job.runs(4)
    assert (job.head().round, [agent.losses for agent in job.agents]) == (1, [[]] * 4)
    fail(job.running[chance.randrange(4)])
    assert job.until(partial(job.runs_after, 1, 4))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_agents_stop_without_etcd_quorum_and_rejoin_when_it_returns(etcd_cluster, world):
    server = etcd_cluster.server
    job = world(etcd_cluster, 3, ttl=QUICK)
    assert job.until(lambda: job.runs(3))
    for index in (0, 1):
        server.stop(index)
    assert job.until(lambda: all(agent.losses for agent in job.agents))
    assert job.until(lambda: not job.running)
    server.mend()
    assert job.until(lambda: job.runs(3))
    assert job.head().round > 1
    assert job.head().used == 0
