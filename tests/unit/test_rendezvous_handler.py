"""Tests for the rendezvous handler of agents that poll. The agents are threads of the test process."""

import contextlib
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import ports
from helpers.etcd_fixtures import site
from helpers.procs import HANG

from elasticrs._engine.nodes.protocol.messages import Outcome
from elasticrs._engine.nodes.rendezvous_store import RendezvousStore
from elasticrs.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from elasticrs.rendezvous.elastic_handler import error_of
from elasticrs.rendezvous.registry import get_rendezvous_handler
from elasticrs.store import DistNetworkError


@pytest.fixture
def place(either_store):
    """Return the back end, the endpoint and the settings of the rendezvous."""
    if either_store is None:
        return "c10d", f"127.0.0.1:{ports.free()}", {}
    etcd = site(either_store)
    return "etcd", etcd.endpoint, {"etcd_prefix": etcd.prefix, "lease_ttl": 60}


@pytest.fixture
def handlers(place):
    """Provide a function that makes handlers for one job. All are shut down in parallel, because a host waits
    for the other handlers.
    """
    backend, endpoint, more = place
    made = []

    def make(count, nodes=(2, 2), **config):
        for _ in range(count):
            config = {"last_call_timeout": 0.1, "close_timeout": 5, "scale_up_delay": 0.1, **more, **config}
            parameters = RendezvousParameters(
                backend, endpoint, "job", *nodes, order_hint=len(made), **config
            )
            made.append(get_rendezvous_handler(parameters))
        return made[-count:]

    yield make
    with ThreadPoolExecutor(max(1, len(made))) as pool:
        list(pool.map(lambda handler: handler.shutdown(), made))


@contextlib.contextmanager
def together(count):
    """Yield a function that calls another function with each handler in parallel and returns the futures."""
    with ThreadPoolExecutor(count) as pool:
        yield lambda function, handlers: [pool.submit(function, handler) for handler in handlers]


def meet(handlers):
    with together(len(handlers)) as call:
        return [each.result(HANG) for each in call(lambda handler: handler.next_rendezvous(), handlers)]


def wait_for_the_end(handler):
    """Poll until the round ends, because an agent is not notified of the end."""
    pause = threading.Event()
    while not handler.num_nodes_waiting():
        pause.wait(0.005)


def test_nodes_share_a_new_store_in_each_round(handlers):
    first, second = handlers(2)
    one, other = meet([first, second])
    assert [(info.rank, info.world_size) for info in (one, other)] == [(0, 2), (1, 2)]
    assert one.bootstrap_store_info == other.bootstrap_store_info
    one.store.set("key", "value")
    assert other.store.get("key") == b"value"
    assert (first.num_nodes_waiting(), second.num_nodes_waiting()) == (0, 0)
    again = meet([first, second])
    assert not again[1].store.check(["key"])
    with pytest.raises(DistNetworkError):
        other.store.check(["key"])
    assert again[0].bootstrap_store_info != one.bootstrap_store_info


def test_a_next_rendezvous_call_during_a_round_ends_the_round_for_all_nodes(handlers):
    first, second = handlers(2)
    meet([first, second])
    with together(1) as call:
        (waiting,) = call(lambda handler: handler.next_rendezvous(), [second])
        wait_for_the_end(first)
        assert (first.next_rendezvous().rank, waiting.result(HANG).rank) == (0, 1)


def test_the_worker_store_accepts_connections(handlers):
    (only,) = handlers(1, (1, 1))
    info = only.next_rendezvous().bootstrap_store_info
    socket.create_connection((info.master_addr, info.master_port)).close()


def test_disabled_store_sharing_gives_rank_0_a_reserved_port(handlers, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    first, last = (port := ports.free()), port + 20
    (only,) = handlers(1, (1, 1), worker_port_range=f"{first}-{last}")
    assert not only.use_agent_store
    info = only.next_rendezvous().bootstrap_store_info
    assert first <= info.master_port <= last
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((info.master_addr, info.master_port))
    with socket.create_server(("", info.master_port), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        assert server.getsockname()[1] == info.master_port


def test_closing_ends_the_round_and_waiting_calls(handlers):
    first, second = handlers(2, (1, 1))
    first.next_rendezvous()
    with together(1) as call:
        (spare,) = call(lambda handler: handler.next_rendezvous(), [second])
        first.set_closed()
        wait_for_the_end(first)
        with pytest.raises(RendezvousClosedError, match="node"):
            spare.result(HANG)
    second.shutdown()
    with pytest.raises(RendezvousClosedError):
        first.next_rendezvous()
    assert first.is_closed()
    assert second.is_closed()


def test_shutdown_from_another_thread_ends_a_waiting_call(handlers):
    (alone,) = handlers(1)
    with together(1) as call:
        (waiting,) = call(lambda handler: handler.next_rendezvous(), [alone])
        assert alone.shutdown()
        with pytest.raises(RendezvousClosedError):
            waiting.result(HANG)


def test_too_few_nodes_raise_a_timeout_error(handlers):
    (alone,) = handlers(1, join_timeout=0.3)
    with pytest.raises(RendezvousTimeoutError):
        alone.next_rendezvous()


@pytest.mark.parametrize("either_store", ["own"], indirect=True)
def test_a_port_in_use_raises_a_connection_error(handlers):
    (alone,) = handlers(1, is_host=True)
    refused = pytest.raises(RendezvousConnectionError, match="cannot listen")
    with socket.create_server(("", alone.rendezvous.port)), refused:
        alone.next_rendezvous()


class Asked(Exception):  # noqa: N818 -- raised by a signal
    pass


def test_a_signal_interrupts_a_waiting_call(handlers):
    (alone,) = handlers(1)

    def ask(*_):
        raise Asked

    def ask_when_it_waits():
        pause = threading.Event()
        # Starting the thread `elasticrs-rdzv` is the last step of the call before it waits.
        while not any(thread.name == "elasticrs-rdzv" for thread in threading.enumerate()):
            pause.wait(0.005)
        os.kill(os.getpid(), signal.SIGUSR1)

    previous = signal.signal(signal.SIGUSR1, ask)
    try:
        asker = threading.Thread(target=ask_when_it_waits)
        asker.start()
        with pytest.raises(Asked):
            alone.next_rendezvous()
        asker.join()
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert alone.shutdown()


def test_a_call_that_could_not_start_can_be_repeated(handlers, monkeypatch):
    (alone,) = handlers(1, nodes=(1, 1))

    def fails(*_, **_options):
        raise OSError("for a moment")

    with monkeypatch.context() as patch:
        patch.setattr(RendezvousStore, "this_agent", fails)
        with pytest.raises(OSError, match="for a moment"):
            alone.next_rendezvous()
    assert alone.next_rendezvous().world_size == 1


@pytest.fixture(params=["begun", "not begun"])
def interrupted(handlers, monkeypatch, request):
    """Return a function that makes a handler whose first call is interrupted by an exception while it starts
    its thread.
    """
    start = threading.Thread.start

    def start_and_raise(thread):
        if request.param == "begun":
            start(thread)
        raise Asked

    def make(*nodes):
        (alone,) = handlers(1, nodes=nodes)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_and_raise)
            with pytest.raises(Asked):
                alone.next_rendezvous()
        return alone

    return make


def test_a_signal_during_thread_start_does_not_break_the_next_call(interrupted):
    alone = interrupted(1, 1)
    assert alone.next_rendezvous().world_size == 1
    assert alone.shutdown()


def test_shutdown_works_after_a_signal_during_thread_start(interrupted):
    interrupted(2, 2).shutdown()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("timeout", RendezvousTimeoutError),
        ("lost", RendezvousConnectionError),
        ("refused", RendezvousConnectionError),
        ("spare", RendezvousGracefulExitError),
        ("closed", RendezvousClosedError),
        ("aborted", RendezvousClosedError),
        ("failed", RendezvousClosedError),
    ],
)
def test_each_outcome_raises_the_matching_error_of_torch(kind, error):
    assert type(error_of(Outcome(kind, "why"))) is error
    assert str(error_of(Outcome(kind, "why"))) == "why"


@pytest.mark.filterwarnings("ignore:the static rendezvous is at")
def test_a_static_rendezvous_assigns_the_given_ranks():
    port = ports.free()
    made = [
        get_rendezvous_handler(
            RendezvousParameters("static", f"127.0.0.1:{port}", "job", 2, 2, rank=rank, close_timeout=5)
        )
        for rank in (1, 0)
    ]
    try:
        for _ in range(2):
            infos = meet(made)
            assert [info.rank for info in infos] == [1, 0]
            assert {info.bootstrap_store_info.master_port for info in infos} == {port}
            # The port must be free during the round, because it is lent to the workers of rank 0.
            socket.create_server(("127.0.0.1", port)).close()
    finally:
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda handler: handler.shutdown(), made)) == [True, True]
