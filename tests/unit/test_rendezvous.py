"""Tests for the rendezvous API under torch's names, and for the single-node handlers."""

import os
import socket

import pytest

from elasticrs.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandlerRegistry,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from elasticrs.rendezvous.elastic_handler import ElasticRendezvousHandler
from elasticrs.rendezvous.one_node_handler import OneNodeRendezvous
from elasticrs.rendezvous.registry import get_rendezvous_handler
from elasticrs.store import DistNetworkError, Store


def params(backend="c10d", endpoint="", min_nodes=1, max_nodes=1, **config):
    return RendezvousParameters(backend, endpoint, "job", min_nodes, max_nodes, **config)


@pytest.mark.parametrize("value", [True, 1, "1", "true", "T", "Yes", "y"])
def test_get_as_bool_accepts_several_spellings_of_true(value):
    assert params(key=value).get_as_bool("key") is True


@pytest.mark.parametrize("value", [False, 0, "0", "false", "F", "No", "n"])
def test_get_as_bool_accepts_several_spellings_of_false(value):
    assert params(key=value).get_as_bool("key", default=True) is False


@pytest.mark.parametrize("value", ["", "on", 2, 1.0, "yess"])
def test_get_as_bool_refuses_other_values(value):
    with pytest.raises(ValueError, match="option 'key' does not represent a valid boolean value"):
        params(key=value).get_as_bool("key")


def test_missing_parameters_return_their_defaults():
    empty = params()
    assert empty.get("key") is None
    assert empty.get("key", 7) == 7
    assert empty.get_as_bool("key") is None
    assert empty.get_as_int("key", 5) == 5
    assert params(key="12").get_as_int("key") == 12
    with pytest.raises(ValueError, match="option 'key' does not represent a valid integer value"):
        params(key="x").get_as_int("key")


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0, 1, r"minimum number of rendezvous nodes \(0\)"),
        (3, 2, r"maximum number of rendezvous nodes \(2\)"),
    ],
)
def test_invalid_node_counts_are_refused(low, high, text):
    with pytest.raises(ValueError, match=text):
        params(min_nodes=low, max_nodes=high)


def test_a_backend_cannot_be_registered_with_two_creators():
    registry = RendezvousHandlerRegistry()
    registry.register("mine", OneNodeRendezvous)
    registry.register("mine", OneNodeRendezvous)
    with pytest.raises(ValueError, match="already registered"):
        registry.register("mine", lambda _: None)
    with pytest.raises(ValueError, match="'c10d'"):
        registry.create_handler(params())
    with pytest.raises(ValueError, match="non-empty"):
        registry.register("", OneNodeRendezvous)


def test_a_creator_that_returns_a_handler_of_another_backend_is_refused():
    registry = RendezvousHandlerRegistry()
    registry.register("mine", lambda _: OneNodeRendezvous(params("other")))
    with pytest.raises(RuntimeError, match=r"'other'.*'mine'"):
        registry.create_handler(params("mine"))


def test_every_round_has_a_fresh_store():
    handler = get_rendezvous_handler(params())
    assert handler.use_agent_store
    first = handler.next_rendezvous().bootstrap_store_info.master_port
    socket.create_connection(("localhost", first)).close()
    second = handler.next_rendezvous().bootstrap_store_info.master_port
    assert handler.store_port.number == second
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("localhost", first))
    assert handler.shutdown()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("localhost", second))


def test_disabled_store_sharing_gives_rank_0_a_fresh_reserved_port(monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    handler = get_rendezvous_handler(params())
    assert not handler.use_agent_store
    first = handler.next_rendezvous()
    port = first.bootstrap_store_info.master_port
    assert (first.rank, first.world_size, first.bootstrap_store_info.master_addr) == (0, 1, "localhost")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    second = handler.next_rendezvous()
    assert second.bootstrap_store_info.master_port == handler.store_port.number
    assert handler.shutdown()
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()


@pytest.mark.parametrize(("backend", "endpoint"), [("c10d", "localhost:0"), ("static", "localhost:1234")])
def test_a_single_node_store_opens_no_descriptors_until_it_is_used(backend, endpoint):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    handler = get_rendezvous_handler(params(backend, endpoint))
    first, second = handler.next_rendezvous().store, handler.next_rendezvous().store
    assert isinstance(first, Store)
    before = descriptors()
    first.set("key", "value")
    assert descriptors() > before
    assert (first.get("key"), second.check(["key"])) == (b"value", False)
    inner = second.with_prefix("mine/")
    inner.queue_push("queue", "a")
    inner.barrier("all", 1)
    assert (inner.queue_len("queue"), inner.queue_pop("queue")) == (1, b"a")
    unused = handler.next_rendezvous().store
    assert handler.shutdown()
    assert descriptors() <= before
    for store in (first, second, unused):
        with pytest.raises(DistNetworkError, match="closed"):
            store.get("key")


def test_a_static_endpoint_is_used_unchanged():
    handler = get_rendezvous_handler(params("static", "[::1]:1234"))
    info = handler.next_rendezvous().bootstrap_store_info
    assert info == RendezvousStoreInfo("::1", 1234)
    assert handler.store_port is None
    assert (handler.get_backend(), handler.get_run_id(), handler.num_nodes_waiting()) == ("static", "job", 0)
    assert handler.use_agent_store is False


def test_a_multi_node_rendezvous_requires_an_endpoint():
    with pytest.raises(ValueError, match="rdzv_endpoint"):
        get_rendezvous_handler(params(max_nodes=2))
    with pytest.raises(ValueError, match="1:2 nodes"):
        OneNodeRendezvous(params(max_nodes=2))


@pytest.mark.parametrize("backend", ["c10d", "elasticrs", "static"])
def test_a_multi_node_rendezvous_gets_an_elastic_handler(backend):
    handler = get_rendezvous_handler(params(backend, "node7:1234", min_nodes=2, max_nodes=2))
    assert isinstance(handler, ElasticRendezvousHandler)
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == (
        backend,
        "job",
        backend != "static",
    )
    assert (handler.rendezvous.endpoint, handler.rendezvous.max_nodes) == ("node7:1234", 2)
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed()
    assert handler.shutdown()
    assert handler.is_closed()


def test_rank_0_publishes_the_master_address():
    class Store(dict):
        set = dict.__setitem__

    store = Store()
    chosen = RendezvousStoreInfo.build(0, store, "10.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", chosen.master_port))
    # The workers' store can listen on the reserved port, because it sets SO_REUSEADDR, as torch's store does.
    with socket.create_server(("", chosen.master_port)):
        pass
    published = RendezvousStoreInfo.build(0, store, "10.0.0.1", 7)
    assert RendezvousStoreInfo.build(1, store, None) == published == RendezvousStoreInfo("10.0.0.1", 7)


def test_rendezvous_graceful_exit_error_is_a_rendezvous_error():
    assert issubclass(RendezvousGracefulExitError, RendezvousError)
