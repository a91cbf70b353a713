"""The registry of rendezvous back ends, and the static back end."""

from importlib import metadata

import pytest
from helpers.said import says

from elasticrs.rendezvous import RendezvousParameters, registry, rendezvous_handler_registry
from elasticrs.rendezvous.registry import get_rendezvous_handler
from elasticrs.rendezvous.static_tcp_rendezvous import create_rdzv_handler


def params(backend="c10d", endpoint="", nodes=1, **config):
    return RendezvousParameters(backend, endpoint, "job", nodes, nodes, **config)


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
