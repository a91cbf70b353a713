"""Host lists expand to the same names as in Slurm's own program."""

import pytest
from helpers import procs, slurm
from helpers.host_lists import host_lists
from hypothesis import HealthCheck, given, settings

from elasticrs._engine.cli.schedulers import expand


@pytest.fixture(scope="module")
def hostnames(tmp_path_factory):
    programs = slurm.find()
    if programs is None:
        pytest.skip("needs Slurm, which `make setup` gets where Debian's packages are at hand")
    env = slurm.environment(programs, tmp_path_factory.mktemp("slurm"))

    def ask(text):
        return procs.run_program(["scontrol", "show", "hostnames", text], env=env, check=True).stdout.split()

    return ask


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(host_lists())
def test_expanded_host_lists_match_scontrol(hostnames, made):
    text, hosts = made
    assert expand(text) == hostnames(text) == hosts
