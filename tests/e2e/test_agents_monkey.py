"""Random faults in the agents, nurseries, workers and store of a job on one machine. The report is still
correct.

A failure shows its seed; ``MONKEY_SEED`` and the first of the many games repeat it.
"""

import os
import random
import re
import signal

import pytest
from helpers import agents_monkey, ports
from helpers.nodes import meeting

pytestmark = [pytest.mark.beyond_torchrun, pytest.mark.timeout(240)]

FIRST = 7
GAMES = 25


def judge(folder, seed, *store):
    folder.mkdir()
    game = agents_monkey.play(folder, seed, *store)
    assert not game.complaints, game.report()


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 3))
def test_the_report_is_correct_after_random_faults(tmp_path, seed):
    judge(tmp_path / "game", seed)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(GAMES))
def test_the_report_is_correct_in_many_runs_with_random_faults(tmp_path, number):
    seed = int(os.environ.get("MONKEY_SEED", random.SystemRandom().randrange(10**6)))
    judge(tmp_path / "game", seed + number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_the_report_is_correct_after_random_faults_with_etcd(tmp_path, number, etcd_cluster):
    seed = int(os.environ.get("MONKEY_SEED", random.SystemRandom().randrange(10**6)))
    judge(tmp_path / "game", seed + number, etcd_cluster)


def test_an_agent_stopped_before_its_workers_start_reports_the_signal(launch):
    port = ports.free()
    agents = [launch(*meeting("3", port), "-m", "platform") for _ in range(2)]
    while ports.sessions(port) < 2:
        for agent in agents:
            agent.read_for(0.01)
            assert not agent.has_exited, agent.stderr
    host, other = sorted(agents, key=lambda agent: not ports.listens(agent.pid, port))
    other.signal(signal.SIGTERM)
    assert other.wait() == 1
    # The first line is missing if the signal came before the agent could join.
    assert re.search(rf"(\A|:{other.pid}\]: SIGTERM [^\n]*\n).*SIGTERM [^\n]*\n\Z", other.stderr)
    host.signal(signal.SIGTERM)
    assert host.wait() == 1
    assert re.search("SIGTERM .*its store", host.stderr)
