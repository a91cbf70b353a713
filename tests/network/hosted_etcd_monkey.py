"""Check that a job that hosts etcd on its five nodes survives random kills, pauses, network failures and
shutdowns.

At most two members are down at a time, so a majority is always up. `make soak-hosted` runs 200 rounds.
"""

import os
import random
import re
import signal
import time

import pytest
from helpers.etcd import binary, healthy_members
from helpers.procs import HANG

ROUNDS = int(os.environ.get("ELASTICRS_HOSTED_ROUNDS", "4"))
SEED = int(os.environ.get("ELASTICRS_HOSTED_SEED", "1"))

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.slow,
    pytest.mark.beyond_torchrun,
    pytest.mark.timeout(300 + 120 * ROUNDS),
]

NODES = 5
LOST = re.compile(r"node \w+ was lost|: lost etcd at")
TRIES = 4
CONF = {
    "host": 1,
    # The lease must outlast a leader election of etcd on a loaded machine.
    "lease_ttl": 15,
    "last_call_timeout": 30,
    "store_lost_timeout": 600,
    "max_short_losses": 100_000,
}


class Monkey:
    """Injects faults into random nodes. Each act harms one node and repairs it, or at least starts the
    repair.
    """

    def __init__(self, multinode, machines, folder):
        self.chance, self.machines = random.Random(SEED), machines
        self.done, self.kills = folder / "done", 0
        self.member_killed = dict.fromkeys(machines, 0.0)
        names = ",".join(machine.name for machine in machines)
        self.job = multinode(
            machines[0],
            f"1:{NODES}",
            *("--rdzv-backend", "etcd", "--rdzv-endpoint", names),
            max_restarts=100_000,
            conf=CONF,
            env={"TORCHELASTIC_ETCD_BINARY_PATH": binary(), "DONE": str(self.done)},
        )
        self.agents = dict(zip(machines, self.job.start(*machines), strict=True))
        self.job.formed(*self.agents.values())
        self.wait_for_members()

    # --- acts ---

    def start(self, machine):
        (self.agents[machine],) = self.job.start(machine)

    def power_off(self, machine):
        machine.power_off()
        self.pause(10)
        machine.link_up()
        self.start(machine)

    def kill_agent(self, machine):
        self.agents[machine].signal(signal.SIGKILL)
        self.agents[machine].launched.wait()
        self.start(machine)

    def end_agent(self, machine):
        self.agents[machine].signal(signal.SIGTERM)
        if self.chance.random() < 0.5:
            self.agents[machine].launched.wait()
        self.start(machine)

    def kill_etcd(self, machine):
        self.kill_member(machine, "/etcd --name")

    def kill_program(self, machine):
        self.kill_member(machine, "etcd_host_program")

    def kill_member(self, machine, command):
        # An agent gives up its member after three failures in a row, each less than 10 s after a start.
        while time.monotonic() < self.member_killed[machine] + 15:
            self.pause(1)
        self.each(machine, command, signal.SIGKILL)
        self.member_killed[machine] = time.monotonic()

    def stop_etcd(self, machine):
        self.each(machine, "/etcd --name", signal.SIGSTOP)
        self.pause(6)
        self.each(machine, "/etcd --name", signal.SIGCONT)

    def stop_agent(self, machine):
        self.agents[machine].signal(signal.SIGSTOP)
        self.pause(18)
        self.agents[machine].signal(signal.SIGCONT)

    def cut_off(self, machine):
        machine.link_down()
        self.pause(18)
        machine.link_up()

    def kill_worker(self, machine):
        self.kills += 1
        self.each(machine, "ranks.py", signal.SIGUSR2)

    def each(self, machine, what, signum):
        for process in machine.processes():
            if what in process.command and process.pid != self.agents[machine].pid:
                try:
                    machine.kill(process.pid, signum)
                except ProcessLookupError:
                    continue

    def pause(self, longest):
        """Wait for a random time of at most ``longest`` seconds, while reading the output of the agents."""
        end = time.monotonic() + self.chance.uniform(0, longest)
        while (left := end - time.monotonic()) > 0:
            for agent in self.agents.values():
                agent.launched.read_for(min(left, 0.2) / NODES)

    # --- a round ---

    def act(self):
        on_etcd = [self.kill_etcd, self.kill_program, self.stop_etcd]
        acts = [self.power_off, self.kill_agent, self.end_agent, self.stop_agent, self.cut_off]
        chosen = self.chance.choices([*on_etcd, *acts, self.kill_worker], k=self.chance.choice((1, 1, 2)))
        # Harm at most two of the five nodes, because etcd needs a majority of three.
        for act, machine in zip(chosen, self.chance.sample(self.machines, len(chosen)), strict=True):
            print(f"{act.__name__} on {machine.name}", flush=True)
            act(machine)
            self.pause(self.chance.choice((0.0, 0.3, 3.0)))
        return all(act in on_etcd for act in chosen)

    def play(self):
        before = self.losses()
        only_members = self.act()
        self.wait_for_members()
        if only_members:
            assert self.losses() == before, "a node was lost because of a member of etcd"
        self.recovers()

    def losses(self):
        """Return the number of lost nodes and lost connections to etcd that the agents have reported."""
        for agent in self.agents.values():
            agent.launched.read_for(0)
        return sum(len(LOST.findall(agent.launched.stderr)) for agent in self.agents.values())

    def wait_for_members(self):
        """Wait until all members serve clients."""
        expected = [machine.name for machine in self.machines]
        deadline = time.monotonic() + 2 * HANG
        while (found := healthy_members(*self.machines)) != expected:
            assert time.monotonic() < deadline, f"still only {found} are up"
            self.pause(0.4)

    def recovers(self):
        """Kill workers until all nodes run workers of the same new round."""
        before = max(int(each.round) for each in self.seen())
        for left in reversed(range(TRIES)):
            # Kill a worker to cause a new round. Retry, because the chosen node may not have a worker yet.
            self.kill_worker(self.chance.choice(self.machines))
            try:
                self.job.until(lambda: True if self.is_whole(before) else None, "a whole round", HANG / 2)
                break
            except AssertionError:
                if not left:
                    raise
        self.check()
        self.job.reap()

    def seen(self):
        return [each for agent in self.job.agents for each in agent.workers()]

    def is_whole(self, before):
        """Return true if the newest workers of all nodes belong to the same round, and that round is later
        than ``before``.
        """
        newest = [agent.workers()[-1:] for agent in self.agents.values()]
        found = [each for workers in newest for each in workers]
        rounds = {each.round for each in found}
        is_one = len(rounds) == 1 and {each.world for each in found} == {NODES}
        return is_one and len(found) == NODES and int(rounds.pop()) > before

    def check(self):
        """Check that ranks are unique within a round, that its workers agree on size, master and restarts,
        and that only killed workers cause restarts.
        """
        rounds = {}
        for each in self.seen():
            same = rounds.setdefault(each.round, [])
            assert all(each.rank != other.rank for other in same), (each, same)
            assert all(facts(each) == facts(other) for other in same), (each, same)
            same.append(each)
            assert each.restart <= self.kills, each


def facts(worker):
    return worker.world, worker.master, worker.port, worker.restart


def test_the_job_continues_while_a_majority_is_up(hosts, multinode, tmp_path):
    if binary() is None:
        pytest.skip("needs etcd, which `make setup` gets where Debian's packages are at hand")
    monkey = Monkey(multinode, hosts(NODES), tmp_path)
    for number in range(ROUNDS):
        print(f"--- round {number}", flush=True)
        try:
            monkey.play()
        except AssertionError as error:
            raise AssertionError(monkey.job.story(f"round {number} of seed {SEED}: {error}")) from None
    monkey.done.touch()
    agents = monkey.agents.values()
    codes = monkey.job.ended(*agents, timeout=2 * HANG)
    assert not any(codes), monkey.job.story(f"exit codes {codes}")
    monkey.job.assert_empty()
