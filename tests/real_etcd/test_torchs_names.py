"""Torch's names for the etcd back end and store, with a real etcd."""

import threading
from contextlib import closing
from datetime import timedelta
from types import SimpleNamespace

import pytest

from elasticrs.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
)
from elasticrs.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from elasticrs.rendezvous.elastic.etcd_site import EtcdSite
from elasticrs.rendezvous.etcd_client import EtcdClient
from elasticrs.rendezvous.etcd_rendezvous import (
    EtcdRendezvous,
    EtcdRendezvousHandler,
    create_rdzv_handler,
)
from elasticrs.rendezvous.etcd_rendezvous_backend import EtcdRendezvousBackend, create_backend
from elasticrs.utils.distributed import get_socket_with_port

SOON = timedelta(seconds=0.1)


def params(backend, endpoint, **config):
    return RendezvousParameters(backend, endpoint, "run", 1, 1, **config)


@pytest.fixture(scope="module")
def new_store():
    """Return the class of the store. Import it only for these tests, because it imports torch. That starts a
    thread, which no test may leave behind.
    """
    from elasticrs.rendezvous.etcd_store import EtcdStore

    return EtcdStore


@pytest.fixture
def client(etcd):
    with closing(EtcdClient(EtcdSite(tuple(etcd.server.endpoints), prefix=etcd.prefix))) as made:
        yield made


# --- the store ---


@pytest.fixture
def store(client, new_store):
    with closing(new_store(client, "/store")) as made:
        yield made


def test_etcd_store_has_the_methods_of_a_torch_store(store):
    store.set("a", "1")
    store.set("b", b"\xff")
    assert (store.get("a"), store.get("b"), store.check(["a", "b"]), store.check(["c"])) == (
        b"1",
        b"\xff",
        True,
        False,
    )
    assert (store.add("n", 2), store.add("n", 3), store.get("n")) == (2, 5, b"5")
    store.append("a", "2")
    store.multi_set(["x", "y"], ["1", "2"])
    assert (store.multi_get(["a", "x", "y"]), store.num_keys()) == ([b"12", b"1", b"2"], 5)
    assert store.compare_set("x", "0", "9") == b"1"
    assert store.compare_set("x", "1", "9") == b"9"
    store.queue_push("q", "first")
    assert (store.queue_len("q"), store.queue_pop("q"), store.queue_len("q")) == (1, b"first", 0)
    assert (store.delete_key("x"), store.delete_key("x")) == (True, False)
    assert sorted(store.list_keys()) == ["a", "b", "n", "y"]
    assert store.has_extended_api()


def test_etcd_store_waits_for_keys_until_its_timeout(store):
    thread = threading.Timer(0.05, store.set, ("late", "x"))
    thread.start()
    store.wait(["late"])
    thread.join()
    with pytest.raises(LookupError, match="never"):
        store.wait(["never"], SOON)
    store.set_timeout(SOON)
    assert store.timeout == SOON
    with pytest.raises(LookupError, match="wait timeout after 100ms, keys: never"):
        store.get("never")


def test_keys_and_values_in_etcd_are_encoded_as_in_torch(store, etcd):
    store.set("k", "v")
    assert etcd.keys()["/store/aw=="] == b"dg=="


@pytest.mark.torch
def test_etcd_store_is_an_instance_of_torch_store(store):
    from torch.distributed import PrefixStore, Store

    assert isinstance(store, Store)
    below = PrefixStore("p", store)
    below.set("k", "v")
    assert (below.get("k"), below.add("n", 1), below.check(["k", "n"])) == (b"v", 1, True)
    assert store.get("p/k") == b"v"


def test_a_python_etcd_client_can_be_passed_to_the_store(etcd, new_store):
    host, port = etcd.server.endpoints[0]
    theirs = SimpleNamespace(host=host, port=port, protocol="http")
    prefix = f"{etcd.prefix}/theirs"
    ours = EtcdClient.of(theirs)
    with closing(new_store(theirs, prefix)) as one, closing(new_store(ours, f"{prefix}/")) as other:
        one.set("k", "v")
        assert other.get("k") == b"v"


# --- the back end ---


@pytest.fixture
def backend(client):
    with closing(EtcdRendezvousBackend(client, "job", "/state")) as made:
        yield made


def test_set_state_succeeds_only_with_the_current_token(backend, etcd):
    assert backend.get_state() is None
    assert backend.set_state(b"0", "invalid") is None
    _, first, has_set = backend.set_state(b"a")
    assert has_set
    assert backend.get_state() == (b"a", first)
    assert backend.set_state(b"b") == (b"a", first, False)
    assert backend.set_state(b"b", "invalid") == (b"a", first, False)
    state, second, has_set = backend.set_state(b"b", first)
    assert (state, has_set, second != first) == (b"b", True, True)
    assert backend.set_state(b"c", first) == (b"b", second, False)
    assert etcd.keys()["/state/job"] == b"Yg=="
    assert backend.name == "etcd-v2"


def test_a_corrupt_state_and_an_empty_run_id_are_refused(backend, client):
    client.write("/state/job", "no base64")
    with pytest.raises(RendezvousStateError, match="corrupt"):
        backend.get_state()
    with pytest.raises(ValueError, match="run id"):
        EtcdRendezvousBackend(client, "")


def test_the_dynamic_rendezvous_works_with_the_etcd_backend(client, new_store):
    def meet(number):
        backend = EtcdRendezvousBackend(client, "dynamic", "/state")
        store = new_store(client, "/store")
        with closing(backend), closing(store):
            handler = DynamicRendezvousHandler.from_backend("dynamic", store, backend, 2, 2)
            found[number] = handler.next_rendezvous()
            met.wait()
            handler.shutdown()

    found, met = {}, threading.Barrier(2)
    threads = [threading.Thread(target=meet, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(info.rank, info.world_size) for info in found.values()} == {(0, 2), (1, 2)}


def test_an_etcd_v2_backend_is_created_from_parameters(etcd):
    endpoint = f"http://{etcd.endpoint}"
    backend, store = create_backend(
        params("etcd-v2", endpoint, protocol="hTTp", read_timeout="10", etcd_prefix=etcd.prefix)
    )
    with closing(backend), closing(store):
        assert store.client.read_timeout == 10
        backend.set_state(b"x")
        store.set("k", "v")
    assert {"/torch/elastic/store/aw==", "/torch/elastic/rendezvous/run"} <= set(etcd.keys())


def test_invalid_parameters_are_refused():
    for config, line in (
        ({"read_timeout": "0"}, "read timeout"),
        ({"protocol": "ftp"}, "protocol"),
        ({"ssl_cert": "x"}, "ssl_cert"),
    ):
        with pytest.raises(ValueError, match=line):
            create_backend(params("etcd-v2", "a", **config))
    with get_socket_with_port() as dead, pytest.raises(RendezvousConnectionError, match="etcd"):
        create_backend(params("etcd-v2", f"127.0.0.1:{dead.getsockname()[1]}"))


# --- the handler ---


def test_the_legacy_etcd_rendezvous_of_torch_works(client, etcd):
    meeting = EtcdRendezvous(client, f"{etcd.prefix}/p2p", 1, 1, 1, 60, 30)
    handler = EtcdRendezvousHandler(meeting, None)
    assert (handler.get_backend(), handler.get_run_id()) == ("etcd", "1")
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    info.store.set("k", "v")
    assert info.store.get("k") == b"v"
    assert handler.num_nodes_waiting() == 0
    assert handler.shutdown()
    late = EtcdRendezvousHandler(meeting)
    with pytest.raises(RendezvousClosedError):
        late.next_rendezvous()
    late.shutdown()


def test_an_etcd_rendezvous_handler_is_created_from_parameters(etcd):
    handler = create_rdzv_handler(params("etcd", etcd.endpoint, etcd_prefix=etcd.prefix))
    assert handler.get_backend() == "etcd"
    assert handler.next_rendezvous().world_size == 1
    handler.set_succeeded()
    assert handler.shutdown()
