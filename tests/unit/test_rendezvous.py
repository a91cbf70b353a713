"""The rendezvous API under torch's names, the handlers of a single node, and the registry of back ends."""

import os
import socket
from importlib import metadata

import pytest
from helpers.said import says

from elasticrs.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandlerRegistry,
    RendezvousParameters,
    RendezvousStoreInfo,
    registry,
    rendezvous_handler_registry,
)
from elasticrs.rendezvous.elastic_handler import ElasticRendezvousHandler
from elasticrs.rendezvous.registry import OneNodeRendezvous, get_rendezvous_handler
from elasticrs.rendezvous.static_tcp_rendezvous import create_rdzv_handler
from elasticrs.store import DistNetworkError, Store


def params(backend="c10d", endpoint="", min_nodes=1, max_nodes=1, **config):
    return RendezvousParameters(backend, endpoint, "job", min_nodes, max_nodes, **config)


@pytest.mark.parametrize(
    ("expected", "values"),
    [(True, [True, 1, "1", "true", "T", "Yes", "y"]), (False, [False, 0, "0", "false", "F", "No", "n"])],
)
def test_get_as_bool_accepts_several_spellings(expected, values):
    assert {params(key=value).get_as_bool("key", default=not expected) for value in values} == {expected}


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
    made = RendezvousHandlerRegistry()
    made.register("mine", OneNodeRendezvous)
    made.register("mine", OneNodeRendezvous)
    with pytest.raises(ValueError, match="already registered"):
        made.register("mine", lambda _: None)
    with pytest.raises(ValueError, match="'c10d'"):
        made.create_handler(params())
    with pytest.raises(ValueError, match="non-empty"):
        made.register("", OneNodeRendezvous)


def test_a_creator_that_returns_a_handler_of_another_backend_is_refused():
    made = RendezvousHandlerRegistry()
    made.register("mine", lambda _: OneNodeRendezvous(params("other")))
    with pytest.raises(RuntimeError, match=r"'other'.*'mine'"):
        made.create_handler(params("mine"))


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
    assert (handler.get_backend(), handler.get_run_id()) == (backend, "job")
    assert handler.use_agent_store == (backend != "static")
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


class Entry:
    value = "package:name"

    def __init__(self, name, made):
        self.name = name
        self.load = lambda: made


@pytest.fixture
def installed(monkeypatch):
    """Replace the entry points of installed packages by those in the returned dictionary. Its keys are pairs
    of a group and a name.
    """
    offered = {}

    def entry_points(*, group, name=None):
        return [
            Entry(each, made) for (of, each), made in offered.items() if of == group and name in (None, each)
        ]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    monkeypatch.setattr(rendezvous_handler_registry, "_registry", dict(rendezvous_handler_registry._registry))
    return offered


def handler_named(name):
    class Handler:
        def get_backend(self):
            return name

    return Handler()


@pytest.mark.parametrize("group", ["torchrun.handlers", "elasticrs.rendezvous_handlers"])
def test_packages_can_provide_rendezvous_handlers(installed, group):
    made = handler_named("theirs")
    installed[group, "theirs"] = lambda: lambda _: made
    assert get_rendezvous_handler(params("theirs")) is made


def test_the_elasticrs_entry_point_group_takes_precedence(installed):
    mine = handler_named("both")
    installed["torchrun.handlers", "both"] = lambda: None
    installed["elasticrs.rendezvous_handlers", "both"] = lambda: lambda _: mine
    assert get_rendezvous_handler(params("both")) is mine


def test_register_out_of_tree_handlers_loads_all_packages_as_in_torch(installed, caplog):
    made = handler_named("theirs")
    installed["torchrun.handlers", "theirs"] = lambda: lambda _: made
    installed["torchrun.handlers", "broken"] = lambda: 1 / 0
    installed["torchrun.handlers", "c10d"] = lambda: lambda _: made
    registry._register_out_of_tree_handlers()
    assert rendezvous_handler_registry.is_registered("theirs")
    assert not rendezvous_handler_registry.is_registered("broken")
    (line,) = caplog.messages
    says(line, "'broken'", "package:name: ZeroDivisionError")
    installed.clear()
    assert get_rendezvous_handler(params("theirs")) is made


def test_a_broken_handler_package_is_named(installed):
    installed["torchrun.handlers", "broken"] = lambda: 1 / 0
    with pytest.raises(ValueError, match=r"'broken' .*package:name: ZeroDivisionError"):
        get_rendezvous_handler(params("broken"))


def test_the_static_backend_requires_a_rank_an_address_and_a_port():
    with pytest.raises(ValueError, match="--node-rank"):
        create_rdzv_handler(params("static", "host:1"))
    with pytest.raises(ValueError, match="--master-addr"):
        create_rdzv_handler(params("static", rank=0))
    with pytest.raises(ValueError, match=r"endpoint: host\..* --master-port"):
        create_rdzv_handler(params("static", "host", rank=0))
    handler = create_rdzv_handler(params("static", "[::1]:1234", rank=0))
    found = handler.next_rendezvous().bootstrap_store_info
    assert (found.master_addr, found.master_port, handler.num_nodes_waiting()) == ("::1", 1234, 0)
    assert (handler.get_backend(), handler.is_closed()) == ("static", False)
    assert handler.shutdown()
