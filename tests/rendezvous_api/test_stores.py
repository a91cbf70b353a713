"""Stores and back ends of ``c10d``, and the registry of back ends."""

import os
import re
import tempfile
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import metadata

import pytest
from helpers import ports, procs
from helpers.said import says

from elasticrs.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
    c10d_rendezvous_backend,
    registry,
    rendezvous_handler_registry,
)
from elasticrs.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
    create_backend,
    create_file_backend,
)
from elasticrs.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from elasticrs.rendezvous.registry import get_rendezvous_handler
from elasticrs.rendezvous.static_tcp_rendezvous import create_rdzv_handler
from elasticrs.store import DistStoreError
from elasticrs.store.file_store import FileStore


def params(backend="c10d", endpoint="", nodes=1, **config):
    return RendezvousParameters(backend, endpoint, "job", nodes, nodes, **config)


@pytest.fixture
def store(tmp_path):
    return FileStore(str(tmp_path / "store"), timedelta(seconds=0.05))


def test_a_file_store_holds_keys_and_values(store):
    store.set("a", "1")
    other = FileStore(store.path)
    assert (other.get("a"), other.check(["a"]), other.check(["a", "b"])) == (b"1", True, False)
    assert (store.add("n", 2), other.add("n", -5)) == (2, -3)
    other.append("a", b"\xff")
    assert store.multi_get(["a", "n"]) == [b"1\xff", b"-3"]
    assert (store.num_keys(), store.delete_key("n"), store.delete_key("n")) == (2, True, False)
    with pytest.raises(DistStoreError, match="wait timeout after 50ms, keys: x, y"):
        store.wait(["x", "y"])


def test_a_file_store_barrier_waits_for_all_participants(store):
    other = FileStore(store.path)
    store.set_timeout(timedelta(seconds=procs.HANG))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(store.barrier, "b", 2)
        other.set_timeout(timedelta(seconds=procs.HANG))
        other.wait(["b/come"])
        other.barrier("b", 2)
        first.result(procs.HANG)
    with pytest.raises(DistStoreError, match="barrier timeout after 10ms, key: c"):
        store.barrier("c", 2, timedelta(milliseconds=10))


def test_compare_set_replaces_only_the_expected_value(store):
    assert store.compare_set("k", "x", "new") == b"x"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "new") == b"new"
    assert store.compare_set("k", "old", "newer") == b"new"
    assert store.compare_set("k", b"new", "newer") == b"newer"


def test_concurrent_writers_of_a_file_store_lose_no_update(store):
    def count():
        mine = FileStore(store.path)
        for _ in range(25):
            mine.add("n", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.get("n") == b"100"


@pytest.mark.parametrize("data", [b"x", b"[]", b'{"format":"elasticrs.file_store","version":2,"values":{}}'])
def test_a_file_that_is_not_a_file_store_is_refused_and_left_unchanged(tmp_path, data):
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        FileStore(str(path))
    assert path.read_bytes() == data


def test_a_folder_is_refused_as_the_path_of_a_file_store(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(IsADirectoryError):
        FileStore(str(folder))
    assert list(tmp_path.iterdir()) == [folder]


def test_a_backend_replaces_a_state_only_with_its_current_token(store):
    backend = C10dRendezvousBackend(store, "job")
    assert backend.get_state() is None
    assert backend.set_state(b"one", token=7) is None
    state, token, is_set = backend.set_state(b"one")
    assert (state, is_set) == (b"one", True)
    assert backend.set_state(b"two")[::2] == (b"one", False)
    assert backend.set_state(b"two", token)[::2] == (b"two", True)
    assert backend.set_state(b"three", token)[::2] == (b"two", False)
    store.set("torch.rendezvous.job", "?")
    with pytest.raises(RendezvousStateError, match="corrupt"):
        backend.get_state()
    with pytest.raises(ValueError, match="run id"):
        C10dRendezvousBackend(store, "")


def test_a_failing_store_raises_a_connection_error():
    class Broken:
        def compare_set(self, *_):
            raise RuntimeError("gone")

    with pytest.raises(RendezvousConnectionError, match="gone"):
        C10dRendezvousBackend(Broken(), "job")


# Run it in a separate process, because the thread of torch's store stops only when the interpreter exits.
TORCH_STORES = """
import sys
from datetime import timedelta
from torch.distributed import FileStore, PrefixStore, TCPStore
from elasticrs.rendezvous import RendezvousConnectionError, RendezvousParameters
from elasticrs.rendezvous.c10d_rendezvous_backend import create_backend
endpoint, path = sys.argv[1:]
def made(endpoint=endpoint, **config):
    return create_backend(RendezvousParameters("c10d", endpoint, "job", 1, 1, **config))
first, served = made(read_timeout=20)
second, found = made(is_host=False)
assert type(served) is type(found) is TCPStore, (served, found)
assert f"{served.host}:{served.port}" == endpoint and served.timeout == timedelta(seconds=20)
assert first.set_state(b"x")[2] and second.get_state()[0] == b"x"
PrefixStore("a", found).set("k", "v")
assert served.get("a/k") == b"v"
third, store = made(path, store_type="file")
assert type(store) is FileStore and store.path == path and third.set_state(b"y")[2]
try:
    made("localhost:1", is_host=False, read_timeout=1)
except RendezvousConnectionError as error:
    assert error.__cause__ is not None and "C10d store has failed" in str(error)
else:
    raise AssertionError("nobody serves it")
"""


@pytest.mark.torch
def test_stores_created_by_programs_are_torch_stores(tmp_path, torch_programs):
    torch_programs.checked(TORCH_STORES, f"localhost:{ports.free()}", str(tmp_path / "file"))


def test_a_temporary_store_file_is_removed_with_its_store(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    backend, store = create_file_backend(params(endpoint="", store_type="file"))
    assert backend.set_state(b"x")[2]
    assert len(list(tmp_path.glob("elasticrs-rdzv-*/store"))) == 1
    if not (child := os.fork()):
        # Exit like a child process of multiprocessing, which runs finalizers that it has inherited with the
        # store.
        weakref.finalize._exitfunc()
        os._exit(0)
    os.waitpid(child, 0)
    assert backend.get_state()[0] == b"x"
    del backend, store
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"store_type": "tape"}, "store type"),
        ({"read_timeout": 0}, "read timeout"),
    ],
)
def test_invalid_settings_are_refused(config, text):
    with pytest.raises(ValueError, match=text):
        create_backend(params(**config))


def test_c10d_with_a_file_store_uses_the_dynamic_handler(tmp_path):
    handler = get_rendezvous_handler(params(endpoint=str(tmp_path / "file"), store_type=" FILE "))
    assert isinstance(handler, DynamicRendezvousHandler)
    assert handler.next_rendezvous().world_size == 1
    assert handler.shutdown()


class Entry:
    value = "package:name"

    def __init__(self, name, made):
        self.name = name
        self.load = lambda: made


@pytest.fixture
def installed(monkeypatch):
    """Fake entry points of installed packages, by group and name."""
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


@pytest.mark.parametrize(
    ("name", "config"), [("FileStore", {"store_type": "file"}), ("TCPStore", {"is_host": False})]
)
def test_store_classes_can_be_replaced_in_the_same_module_as_in_torch(tmp_path, monkeypatch, name, config):
    made = []

    def replaced(*args, **_):
        made.append(args)
        return FileStore(str(tmp_path / "mine"))

    monkeypatch.setitem(vars(c10d_rendezvous_backend), name, replaced)
    _, store = create_backend(params(endpoint="localhost:7", **config))
    assert isinstance(store, FileStore)
    assert made == [("localhost:7",) if name == "FileStore" else ("localhost", 7)]


def test_a_broken_handler_package_is_named(installed):
    installed["torchrun.handlers", "broken"] = lambda: 1 / 0
    with pytest.raises(ValueError, match=r"'broken' .*package:name: ZeroDivisionError"):
        get_rendezvous_handler(params("broken"))


def test_built_in_backends_are_registered_without_further_imports():
    for name in ("c10d", "static"):
        assert rendezvous_handler_registry.is_registered(name)


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
