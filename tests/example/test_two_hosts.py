"""The script for two hosts: the same command line on two hosts starts one job."""

import os
import sys
from pathlib import Path

import pytest
from helpers import ports
from helpers.launcher import Launched, clean_environment
from helpers.nodes import RANKS, finish, round_of

SCRIPT = Path(__file__).resolve().parents[2] / "examples/two_hosts.sh"

pytestmark = [pytest.mark.beyond_torchrun, pytest.mark.timeout(120)]


@pytest.fixture
def host(tmp_path):
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    started = []

    def host(*arguments):
        environment = clean_environment() | {"PATH": path}
        started.append(Launched(["sh", str(SCRIPT), *arguments], env=environment, cwd=tmp_path))
        return started[-1]

    yield host
    for each in started:
        each.close()


def test_the_same_command_line_on_two_hosts_forms_one_job(host):
    line = ("c10d", f"127.0.0.1:{ports.free()}", str(RANKS))
    agents = [host(*line), host(*line)]
    finish(agents, round_of(agents, [1, 1]))


@pytest.mark.parametrize("line", [(), ("zookeeper", "a", "b.py")])
def test_unknown_arguments_are_refused(host, line):
    host(*line).exits(2)
