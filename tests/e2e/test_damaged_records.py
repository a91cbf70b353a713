"""Another program writes over the keys of a job that runs:
it goes on, or ends with a line that names it."""

import json
import os
import re
import signal

import pytest
from helpers import ports
from helpers.coordination import Client
from helpers.nodes import RANKS, Worker, meeting

from elasticrs._core import Op

pytestmark = [pytest.mark.beyond_torchrun, pytest.mark.timeout(150)]

PREFIX = "/elasticrs/job/"
FAIL, SUCCEED = signal.SIGUSR2, signal.SIGUSR1


class Nodes:
    """A job of two agents on this machine, and a foreign client of its store. The first agent hosts the
    store.
    """

    def __init__(self, launch):
        self.port = ports.free()
        self.options = (*meeting("2", self.port), "--max-restarts=2", RANKS)
        self.agents = [launch(*self.options)]
        self.stranger = None
        self.agents += [launch(*self.options)]

    def workers(self, attempt):
        """Return the workers of an attempt, once both have reported."""
        found = []
        for agent in self.agents:
            line = agent.wait_for_line(rf"READY (.* restart={attempt} .*)$", "stdout")
            found.append(Worker.parse(line[1]))
        assert sorted(each.rank for each in found) == [0, 1]
        return found

    def damage(self, kind, value):
        """Overwrite all existing keys of a kind, and return their names."""
        if self.stranger is None:
            self.stranger = Client(self.port, run_id="job", stall_timeout=None).connected()
        reply = self.stranger.txn(then=[Op.range(PREFIX, 0)])
        keys = [entry.key for entry in reply.results[0] if entry.key[len(PREFIX) :].split("/")[0] == kind]
        assert keys, [entry.key for entry in reply.results[0]]
        for key in keys:
            self.stranger.put(key, value)
        return keys

    def ended(self):
        # Disconnect the foreign client first, because the agent that hosts the store waits for all clients.
        self.close()
        codes = [agent.wait() for agent in self.agents]
        for agent in self.agents:
            assert "Traceback" not in agent.stderr, agent.stderr
            assert "Traceback" not in agent.stdout
        return codes

    def close(self):
        if self.stranger is not None:
            self.stranger.close()
            self.stranger = None


@pytest.fixture
def nodes(launch):
    made = Nodes(launch)
    yield made
    made.close()


def tell(workers, signum):
    for worker in workers:
        os.kill(worker.pid, signum)


DAMAGED = [b"\xff\x00", b'{"round": 1e308}', b"[" * 10_000]


# An agent that finds a damaged record joins again. It needs the job's record for that, so only the test below
# damages it.
@pytest.mark.parametrize("value", DAMAGED)
def test_a_job_with_damaged_store_records_restarts_and_succeeds(nodes, value):
    first = nodes.workers(0)
    for kind in ("slot", "nodes", "table"):
        nodes.damage(kind, value)
    tell(first[:1], FAIL)
    second = nodes.workers(1)
    for kind in ("slot", "nodes", "table"):
        nodes.damage(kind, value)
    tell(second, SUCCEED)
    assert nodes.ended() == [0, 0]
    assert any(f"{PREFIX}slot/" in agent.stderr for agent in nodes.agents)


def running_at(round_):
    head = {"state": "RUNNING", "round": round_, "form": "1.1", "used": 0, "size": 2, "world_size": 2}
    return json.dumps({**head, "master": ["127.0.0.1", 29500]}).encode()


@pytest.mark.parametrize("value", [b"\xff", b"[]", running_at(1e308), running_at(10**400)])
def test_a_damaged_head_record_fails_the_job_and_is_named(nodes, value):
    nodes.workers(0)
    (key,) = nodes.damage("head", value)
    assert nodes.ended() == [1, 1]
    for agent in nodes.agents:
        assert re.search(rf"^elasticrs.*: .*{key}", agent.stderr, re.MULTILINE)


def test_a_late_agent_is_refused_if_the_job_record_is_damaged(launch, nodes):
    nodes.workers(0)
    (key,) = nodes.damage("job", b'["what"]')
    late = launch(*nodes.options).exits(1)
    assert key in late.stderr
    assert "Traceback" not in late.stderr
    tell(nodes.workers(0), SUCCEED)
    assert nodes.ended() == [0, 0]
