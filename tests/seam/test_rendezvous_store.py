"""Before an agent has met the others, a name server or another program that does not answer delays the agent
only briefly.
"""

import socket
import threading
import time
from types import SimpleNamespace

import pytest
from helpers import ports, procs
from helpers.rendezvous import rendezvous

from elasticrs._engine.nodes.hosting import Hosting, SystemResolver
from elasticrs._engine.nodes.protocol.rendezvous import command_of
from elasticrs._engine.nodes.rendezvous_store import RendezvousStore
from elasticrs._engine.nodes.transport.coordination import ConnectionLost

LIMIT = 10.0
"""Seconds that are much longer than the time limit of 1 s, and much shorter than those of name servers."""


@pytest.fixture
def dead_resolver(monkeypatch):
    """Make all name lookups hang until the end of the test."""
    answers = threading.Event()

    def resolve(_self, name):
        answers.wait()
        raise OSError(name)

    monkeypatch.setattr(SystemResolver, "resolve", resolve)
    yield
    answers.set()


def lost(point):
    """Wait until the store reports that it has no connection."""
    procs.wait_until(point.take, lambda events: any(isinstance(each, ConnectionLost) for each in events))


def test_a_name_server_that_does_not_answer_delays_each_attempt_to_connect_only_briefly(dead_resolver):
    point = RendezvousStore(rendezvous("localhost", ports.free()), None, found=Hosting((), "it is elsewhere"))
    try:
        for _ in range(2):
            began = time.monotonic()
            assert point.connect() is None
            assert time.monotonic() - began < LIMIT
            lost(point)
        assert not point.hosts
    finally:
        point.close()


def test_a_program_that_does_not_answer_at_the_endpoint_delays_a_job_of_one_node_only_briefly():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        found = Hosting((("127.0.0.1", port),), "localhost is this machine")
        job = rendezvous("localhost", port, nodes=(1, 1), command=command_of(["train.py"], "/train.py"))
        point = RendezvousStore(job, None, found=found)
        try:
            began = time.monotonic()
            point.host_if_possible()
            assert time.monotonic() - began < LIMIT
            assert point.hosts
            assert point.address[1] != port
        finally:
            point.close()


@pytest.mark.parametrize(("job", "announced"), [(None, ["10.0.0.1 1001"]), ("job of the workers", [])])
def test_only_an_agent_announces_the_workers_store_and_not_a_worker(monkeypatch, job, announced):
    # The token of a worker gives no access to the key, so the store would close the worker's connection.
    own = rendezvous("localhost", ports.free()).replaced(job=job)
    point = RendezvousStore(own, None, found=Hosting((), "it is elsewhere"))
    sent = []
    monkeypatch.setattr(point, "send", sent.append)
    try:
        point.announce_workers_store("agent", SimpleNamespace(state="RUNNING", master=("10.0.0.1", 1001)))
    finally:
        point.close()
    assert [put.value.decode() for txn in sent for put in txn.then] == announced
