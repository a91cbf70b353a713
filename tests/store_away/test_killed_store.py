"""A separate store with a state file is killed and restarted without any effect on a running job."""

import os
import random
import signal
from pathlib import Path

import pytest
from helpers import ports, procs
from helpers.coordination import store_command
from helpers.launcher import Launched, clean_environment
from helpers.nodes import FAIL, RANKS, READY, finish, rdzv, round_of
from helpers.said import says

KILL = signal.SIGKILL

TIMES = int(os.environ.get("ELASTICRS_STORE_KILLS", "20"))
"""`make soak-store` takes 200."""

pytestmark = [pytest.mark.beyond_torchrun, pytest.mark.timeout(180 + 6 * TIMES)]

NODES = 3
GRACE = 120
"""Seconds: however loaded the machine is, the store is back by then."""


class Store:
    """``python -m elasticrs.store --state``, which tests can kill and restart."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.folder, self.options, self.port = folder, options, ports.free()
        self.program: Launched | None = None

    def start(self, state: str | None = "state", **options: object) -> "Store":
        argv = store_command(port=self.port)
        if state is not None:
            argv += ["--state", str(self.folder / state)]
            for name, value in {**self.options, **options}.items():
                argv += [f"--{name}", str(value)]
        self.program = Launched(argv, env=clean_environment(), cwd=self.folder)
        procs.bystanders.add(self.program.pid)
        self.program.wait_for_line("serving at", "stdout")
        return self

    def kill(self) -> None:
        self.end(KILL)

    def end(self, signum: int) -> None:
        assert self.program is not None
        self.program.signal(signum)
        self.program.wait()
        self.close()

    def close(self) -> None:
        if self.program is not None:
            procs.bystanders.discard(self.program.pid)
            self.program.close()
            self.program = None


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path, grace=GRACE)
    yield made
    made.close()


@pytest.fixture
def job(launch, store):
    """Return a function that starts the agents of a job that meet in the store."""

    def job(**conf):
        where = rdzv("c10d", f"127.0.0.1:{store.port}", is_host=0, **conf)
        return [launch(*where, f"--nnodes={NODES}", "--max-restarts=100", RANKS) for _ in range(NODES)]

    return job


def workers(agents, number):
    """Return each agent's ``number``-th worker. Check that they belong to one round."""
    return round_of(agents, [number] * NODES)


def rounds(agent):
    """Return how many times the agent has started its worker."""
    return len(READY.findall(agent.stdout))


def test_a_job_succeeds_without_a_restart_while_its_store_is_killed_repeatedly(store, job):
    store.start()
    agents = job()
    found = workers(agents, 1)
    chance = random.Random(1)
    for _ in range(TIMES):
        agents[0].read_for(chance.uniform(0, 0.2))
        store.kill()
        agents[0].read_for(chance.uniform(0, 0.2))
        store.start()
    finish(agents, found)
    for agent in agents:
        assert rounds(agent) == 1, agent.stderr
        assert "killed" not in agent.stderr


def test_a_store_reports_whether_its_state_is_empty(store):
    for is_empty in (True, False):
        store.start()
        assert store.program is not None
        line = store.program.wait_for_line("^elasticrs store: .*", "stderr")[0]
        assert (str(store.folder / "state") in line, "empty" in line) == (True, is_empty)
        store.kill()


def test_a_job_continues_after_its_store_exits_cleanly_and_is_restarted(store, job):
    store.start()
    agents = job()
    found = workers(agents, 1)
    store.end(signal.SIGTERM)
    store.start()
    os.kill(found[0].pid, FAIL)
    again = workers(agents, 2)
    assert {(each.round, each.restart) for each in again} == {("2", 1)}
    finish(agents, again)


@pytest.mark.parametrize("state", [None, "another"])
def test_agents_refuse_a_store_that_was_restarted_without_its_state(store, job, state):
    store.start()
    agents = job()
    found = workers(agents, 1)
    store.kill()
    store.start(state)
    for agent in agents:
        agent.exits(1)
        assert "not the store" in agent.stderr
        assert "Traceback" not in agent.stderr
    procs.assert_gone([each.pid for each in found])


def test_a_store_that_does_not_return_ends_the_job_cleanly(store, job):
    store.start(grace=2)
    agents = job(keep_alive_interval=0.4, store_lost_timeout=1)
    found = workers(agents, 1)
    store.kill()
    for agent in agents:
        agent.exits(1)
        cause, last = agent.stderr.splitlines()[-2:]
        assert "failed after" in last
        says(cause, "--rdzv-backend etcd", "elasticrs.store --state")
    procs.assert_gone([each.pid for each in found])
