"""Tests for the port that the rendezvous store and the workers' store use in turn, and for the driver's own
requests.
"""

import select
import socket

import pytest
from helpers import ports
from helpers.rendezvous import rendezvous

from elasticrs._engine.job.restart_policy import RestartSettings
from elasticrs._engine.nodes import driver as driver_module
from elasticrs._engine.nodes.driver import MOST_NAMES, PORT_PATIENCE, Driver, LentPort, now
from elasticrs._engine.nodes.protocol import messages
from elasticrs._engine.nodes.protocol.member import Link
from elasticrs._engine.nodes.protocol.records import Head
from elasticrs._engine.nodes.transport.coordination import ConnectionLost, Delete, Put, Range, Reply


class Session:
    """Fake session. `taken_by` names the process that occupies the port; `None` if the port is free."""

    hosts = True

    def __init__(self):
        self.taken_by = None
        self.listens = True

    def stop_listening(self):
        assert self.listens
        self.listens = False

    def listen_again(self):
        if self.taken_by is not None:
            raise OSError(98, f"taken by {self.taken_by}")
        self.listens = True


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock, and return a list whose only element is the current time in seconds."""
    time = [0.0]
    monkeypatch.setattr(driver_module, "now", lambda: time[0])
    return time


def test_an_agent_that_hosts_no_store_lends_no_port():
    session = Session()
    session.hosts = False
    port = LentPort(session)
    assert port.lend()
    assert session.listens
    assert port.take_back()


def test_a_port_in_use_is_retried_with_growing_pauses(clock):
    session = Session()
    port = LentPort(session)
    port.lend()
    session.taken_by = "a worker"
    assert not port.take_back()
    assert "taken by a worker" in port.trouble
    assert not port.is_overdue
    quick = port.pause
    clock[0] = PORT_PATIENCE
    assert not port.take_back()
    assert port.is_overdue
    assert port.pause > quick
    assert not port.lend()
    session.taken_by = None
    assert port.lend()
    assert not session.listens
    session.taken_by = "another worker"
    assert not port.take_back()
    assert not port.is_overdue


@pytest.fixture
def driver(monkeypatch):
    """Provide the driver of node rank 0 in a job of two nodes, the port of the store that it hosts on
    loopback, and the events that it tells its member.
    """
    told = []
    port = ports.free()
    place = rendezvous("127.0.0.1", port, "static", nodes=(2, 2), node_rank=0, order_hint=0)
    driver = Driver(place, role="r", nproc=1, policy=RestartSettings(0), supervisor=None)
    driver.begin()
    monkeypatch.setattr(driver, "tell", lambda *events: told.extend(events) or [])
    yield driver, port, told
    driver.close()


def accepts(port):
    """Return true if a server listens on the port."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_the_end_of_the_workers_is_reported_after_the_port_is_taken_back(driver):
    driver, port, told = driver
    assert accepts(port)
    assert driver.open_store() is None
    assert not accepts(port)
    with socket.create_server(("", port)):
        ended = messages.GroupEnded()
        assert driver.group_over(ended) == []
        assert driver.seconds_left(100.0) < 1
        assert told == []
        assert "another program" in driver.open_store()
        driver.group_over(ended)
    deadline = now() + 10
    while ended not in told and now() < deadline:
        select.select(driver.fds, [], [], driver.seconds_left(10.0))
        driver.poll()
    assert ended in told
    assert accepts(port)


def test_a_port_taken_by_another_program_is_reported_once(driver, monkeypatch):
    driver, port, told = driver
    assert driver.open_store() is None
    with socket.create_server(("", port)):
        driver.group_over(messages.GroupEnded())
        monkeypatch.setattr(LentPort, "is_overdue", property(lambda _: True))
        texts = [action.text for _ in range(3) for action in driver._take_port_back()]
        (text,) = texts
        assert f"port {port} " in text
        assert [type(event) for event in told] == [messages.GroupEnded]


def head(form, size=2):
    return Head("RUNNING", 1, form, size=size)


def test_the_names_of_the_nodes_are_requested_once_in_a_round_and_connection(driver, monkeypatch):
    driver, _, _ = driver
    sent, member = [], driver._member
    monkeypatch.setattr(driver.store, "send", sent.append)
    monkeypatch.setattr(driver.store, "connect", lambda **_: None)

    def requests(form, size=2, *, asks=True):
        sent.clear()
        member.link, member.last_head = Link(head=head(form, size)), head(form, size)
        assert [driver.node_names(asks=asks) for _ in range(2)] == [None, None]
        return sent[:]

    assert requests("1.1", asks=False) == []
    (request,) = requests("1.1")
    assert request.then == [Range(member.keys.table("1.1"), 1)]
    assert requests("1.1") == []
    driver._connect()
    assert requests("1.1") != []
    assert [each.then[0].limit for each in requests("1.2", MOST_NAMES)] == [10]
    assert requests("1.3", MOST_NAMES + 1) == []
    member.link = None
    member.last_head = head("1.4")
    assert driver.node_names(asks=True) is None
    assert sent == []


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("first", [True, False, None])
def test_the_node_is_barred_only_if_it_leaves(driver, monkeypatch, first, leaves):
    driver, _, _ = driver
    sent, told, member = [], [], driver._member
    monkeypatch.setattr(driver.store, "send", sent.append)
    member.link = None
    driver.claim_drain(stays_out=True, take=told.append)
    assert told.pop() is None
    member.link, member.last_head = Link(head=head("1.1")), head("1.1")
    driver.claim_drain(stays_out=True, take=lambda is_first: told.append(is_first) or leaves)
    # A second order for the same node is refused at once, and does not displace the first one.
    driver.claim_drain(stays_out=True, take=lambda is_first: told.append(("second", is_first)) or leaves)
    assert told == [("second", False)]
    (claim,) = sent
    leaving = member.keys.leaving(1)
    assert [each.key for each in claim.then] == [leaving]
    reply = ConnectionLost("eof", "") if first is None else Reply(claim.tag, first, 9)
    monkeypatch.setattr(driver.store, "take", lambda: [reply])
    driver.poll()
    assert told[1:] == [first]
    node = member.agent.node
    done = [Put(member.keys.bar(node), node.encode(), False)] if leaves else [Delete(leaving)]
    assert [each for request in sent[1:] for each in request.then] == (done if first else [])


def test_success_is_reported_without_waiting_for_the_port(driver):
    driver, port, told = driver
    assert driver.open_store() is None
    with socket.create_server(("", port)):
        driver.group_over(messages.WorkersDone())
        assert [type(event) for event in told] == [messages.WorkersDone]
        assert driver.seconds_left(100.0) < 1
