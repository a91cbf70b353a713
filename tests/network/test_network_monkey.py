"""A job on several hosts recovers from random faults at random moments."""

import random
import signal

import pytest
from helpers import procs
from helpers.procs import HANG

pytestmark = [pytest.mark.privileged, pytest.mark.slow, pytest.mark.beyond_torchrun, pytest.mark.timeout(300)]

ACTS = 8
QUICK = {
    "keep_alive_interval": 0.4,
    "keep_alive_max_attempt": 5,
    "store_lost_timeout": 60,
    "max_short_losses": 1000,
}


class Monkey:
    """Injects faults into a job on three nodes. The first node hosts the store, so only its worker
    is harmed.
    """

    def __init__(self, multinode, machines, folder, seed):
        self.chance = random.Random(seed)
        self.done = folder / "done"
        self.job = multinode(machines[0], "2:3", max_restarts=1000, conf=QUICK, env={"DONE": str(self.done)})
        self.agents = self.job.start(*machines)
        self.job.formed(*self.agents)

    def workers_of(self, agent):
        return [each for each in agent.workers() if agent.host.holds(each.pid)]

    def kill_worker(self):
        self.job.tell(self.workers_of(self.chance.choice(self.agents)), signal.SIGKILL)

    def fail_all_workers(self):
        self.job.tell([each for agent in self.agents for each in self.workers_of(agent)], signal.SIGUSR2)

    def replace_agent(self, signum):
        old = self.chance.choice(self.agents[1:])
        old.signal(signum)
        if self.chance.random() < 0.5:
            old.launched.wait()
        self.agents[self.agents.index(old)] = self.job.start(old.host)[0]

    def cut_off(self):
        agent = self.chance.choice(self.agents[1:])
        workers = [each.pid for each in self.workers_of(agent)]
        agent.host.link_down()
        procs.assert_gone(workers)
        agent.host.link_up()

    def stop_agent(self):
        agent = self.chance.choice(self.agents[1:])
        workers = [each.pid for each in self.workers_of(agent)]
        agent.signal(signal.SIGSTOP)
        procs.assert_gone(workers)
        agent.signal(signal.SIGCONT)

    def act(self):
        acts = {
            "kill a worker": self.kill_worker,
            "fail all workers": self.fail_all_workers,
            "kill an agent": lambda: self.replace_agent(signal.SIGKILL),
            "end an agent": lambda: self.replace_agent(signal.SIGTERM),
            "cut a host off": self.cut_off,
            "stop an agent": self.stop_agent,
        }
        name = self.chance.choice(list(acts))
        print(name)
        acts[name]()
        # Wait for a random time, so that the next fault hits a running round, one that is stopping, or one
        # that is forming.
        moment = self.chance.choice((0.0, 0.05, 0.3, 1.0)) * self.chance.random()
        self.agents[0].launched.read_for(moment)

    def recovers(self):
        """Make all workers fail, wait until all three nodes run a new round, and check that the job
        succeeds.
        """
        self.job.forget()
        self.fail_all_workers()
        self.job.formed(*self.agents, timeout=2 * HANG)
        self.done.touch()
        codes = self.job.ended(*self.agents, timeout=2 * HANG)
        assert codes == [0, 0, 0], self.job.story(f"exit codes {codes}")
        self.job.ended()
        self.job.assert_empty()


@pytest.mark.parametrize("seed", range(4))
def test_the_job_recovers_from_random_faults(hosts, multinode, tmp_path, seed):
    print(f"seed {seed}")
    monkey = Monkey(multinode, hosts(3), tmp_path, seed)
    for _ in range(ACTS):
        monkey.act()
    monkey.recovers()
