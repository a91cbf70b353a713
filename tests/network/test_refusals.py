"""A configuration error makes an agent exit promptly with one clear line, and leaves nothing behind."""

import signal
import sys

import pytest
from helpers.nodes import PORT, running_on
from helpers.talk import serving

pytestmark = [pytest.mark.privileged, pytest.mark.beyond_torchrun, pytest.mark.timeout(120)]

SOON = {"join_timeout": 2, "connect_timeout": 1}


def says(job, agent, *texts):
    """Check that the agent fails with a line that contains all of these texts, and return the line."""
    (code,) = job.ended(agent)
    assert code not in {0, -signal.SIGKILL}, job.story(f"exit code {code}")
    lines = [line for line in agent.launched.stderr.splitlines() if all(text in line for text in texts)]
    assert lines, job.story(f"no line has {texts}")
    assert "Traceback" not in agent.launched.stderr, job.story("a traceback")
    job.assert_empty(agent.host)
    return lines[0]


HTTP = (sys.executable, "-u", "-m", "http.server", str(PORT))
TCPSTORE = f"""
import signal
from torch.distributed import TCPStore
store = TCPStore("0.0.0.0", {PORT}, is_master=True, wait_for_workers=False)
print("listening", flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    ("endpoint", "tokens"),
    [
        (None, ("10.77.0.1:29400", "refused", "--rdzv-endpoint")),
        ("nowhere.test:29400", ("nowhere.test",)),
        ("10.77.0.99:29400", ("10.77.0.99:29400", "firewall")),
    ],
    ids=["no store", "no name", "no answer"],
)
def test_an_unreachable_store_is_named_in_the_error(hosts, multinode, endpoint, tokens):
    first, second = hosts(2)
    job = multinode(first, "2", conf=SOON)
    says(job, *job.start(second, endpoint=endpoint), *tokens)


def test_a_taken_port_on_the_store_host_is_named_in_the_error(hosts, multinode):
    (host,) = hosts(1)
    job = multinode(host, "2", conf=SOON)
    with serving(host, PORT):
        says(job, *job.start(host), "29400")
        line = says(job, *job.start(host, conf={"is_host": 1}), "all addresses", "29400: Address")
        assert line.count("29400") == 1, line


@pytest.mark.parametrize(
    "server",
    [HTTP, pytest.param((sys.executable, "-c", TCPSTORE), marks=[pytest.mark.torch, pytest.mark.slow])],
    ids=["http", "torch"],
)
def test_another_server_at_the_endpoint_is_reported(hosts, multinode, server):
    first, second = hosts(2)
    job = multinode(first, "2", conf=SOON)
    with running_on(first, *server):
        says(job, *job.start(second), "10.77.0.1:29400", "another program")


@pytest.mark.parametrize(
    ("right", "wrong", "texts"),
    [
        ({"env": {"ELASTICRS_TOKEN": "correct"}}, {"env": {"ELASTICRS_TOKEN": "incorrect"}}, ["token"]),
        ({}, {"options": ("--rdzv-id", "other")}, ["other", "job"]),
    ],
    ids=["token", "run id"],
)
def test_an_agent_with_a_wrong_token_or_run_id_is_refused(hosts, multinode, right, wrong, texts):
    first, second = hosts(2)
    job = multinode(first, "2")
    (early,) = job.start(first, **right)
    line = says(job, *job.start(second, **wrong), *texts)
    assert "correct" not in line
    # The rejected agent did not affect the job.
    (late,) = job.start(second, **right)
    job.finish((early, late), job.formed(early, late))


def test_too_few_nodes_are_reported_after_the_join_timeout(hosts, multinode):
    first, second = hosts(2)
    job = multinode(first, "3", conf={"join_timeout": 2})
    for agent in job.start(first, second):
        says(job, agent, "2 of", "3")
