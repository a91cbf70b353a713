"""Five nodes that host etcd: killed, stopped, cut off and ended in order, at random moments; the job goes on.

`make soak-hosted` plays 200 rounds.
"""

import os
import random
import signal
import time

import pytest
from helpers.etcd import binary, hosted_voters
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
TRIES = 4
CONF = {
    "host": 1,
    # A lease that outlasts an election.
    "lease_ttl": 8,
    "last_call_timeout": 30,
    "store_lost_timeout": 600,
    "max_short_losses": 100_000,
}


class Monkey:
    """Every act befalls one node, which is whole again afterwards, or on the way to that."""

    def __init__(self, multinode, machines, folder):
        self.chance, self.machines = random.Random(SEED), machines
        self.done, self.kills = folder / "done", 0
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

    # --- what befalls a node ---

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
        self.each(machine, "/etcd --name", signal.SIGKILL)

    def kill_program(self, machine):
        self.each(machine, "etcd_host_program", signal.SIGKILL)

    def stop_etcd(self, machine):
        self.each(machine, "/etcd --name", signal.SIGSTOP)
        self.pause(6)
        self.each(machine, "/etcd --name", signal.SIGCONT)

    def stop_agent(self, machine):
        self.agents[machine].signal(signal.SIGSTOP)
        self.pause(12)
        self.agents[machine].signal(signal.SIGCONT)

    def cut_off(self, machine):
        machine.link_down()
        self.pause(12)
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
        """A random moment, while the agents' output is read."""
        end = time.monotonic() + self.chance.uniform(0, longest)
        while (left := end - time.monotonic()) > 0:
            for agent in self.agents.values():
                agent.launched.read_for(min(left, 0.2) / NODES)

    # --- a round ---

    def act(self):
        acts = [
            *(self.power_off, self.kill_agent, self.end_agent, self.kill_etcd, self.kill_program),
            *(self.stop_etcd, self.stop_agent, self.cut_off, self.kill_worker),
        ]
        # Five members bear two that are away.
        for machine in self.chance.sample(self.machines, self.chance.choice((1, 1, 2))):
            chosen = self.chance.choice(acts)
            print(f"{chosen.__name__} on {machine.name}", flush=True)
            chosen(machine)
            self.pause(self.chance.choice((0.0, 0.3, 3.0)))

    def wait_for_members(self):
        """All have their votes, and answer: one that has just been killed is still listed."""
        expected = [f"http://{machine.name}:2380" for machine in self.machines]
        deadline = time.monotonic() + 2 * HANG
        while (found := hosted_voters(*self.machines)) != expected:
            assert time.monotonic() < deadline, f"still {found} are members"
            self.pause(0.4)

    def recovers(self):
        """All nodes have their members, and run a round that began after everything else."""
        self.wait_for_members()
        before = max(int(each.round) for each in self.seen())
        for left in reversed(range(TRIES)):
            # There may be none there yet.
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
        """True if the newest workers of all nodes are those of one round after another one."""
        newest = [agent.workers()[-1:] for agent in self.agents.values()]
        found = [each for workers in newest for each in workers]
        rounds = {each.round for each in found if each.world == NODES}
        return len(found) == NODES and len(rounds) == 1 and int(rounds.pop()) > before

    def check(self):
        """No rank twice, no round of two minds, and no restart charged but for workers that have failed."""
        rounds = {}
        for each in self.seen():
            same = rounds.setdefault(each.round, [])
            assert all(each.rank != other.rank for other in same), (each, same)
            assert all(facts(each) == facts(other) for other in same), (each, same)
            same.append(each)
            assert each.restart <= self.kills, each


def facts(worker):
    return worker.world, worker.master, worker.port, worker.restart


def test_the_job_outlives_what_befalls_its_nodes(hosts, multinode, tmp_path):
    if binary() is None:
        pytest.skip("needs etcd, which `make setup` gets where Debian's packages are at hand")
    monkey = Monkey(multinode, hosts(NODES), tmp_path)
    for number in range(ROUNDS):
        print(f"--- round {number}", flush=True)
        try:
            monkey.act()
            monkey.recovers()
        except AssertionError as error:
            raise AssertionError(monkey.job.story(f"round {number} of seed {SEED}: {error}")) from None
    monkey.done.touch()
    agents = monkey.agents.values()
    codes = monkey.job.ended(*agents, timeout=2 * HANG)
    assert not any(codes), monkey.job.story(f"exit codes {codes}")
    monkey.job.assert_empty()
