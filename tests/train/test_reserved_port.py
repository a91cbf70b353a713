"""Rank 0 of restarted workers hosts a rendezvous. The port of this rendezvous stays reserved until it is
used.
"""

import socket
import sys
from types import ModuleType

import pytest

from elasticrs import _core
from elasticrs.train import agent


class EnvStore(dict):
    def set(self, key, value):
        self[key] = value.encode()


def test_no_other_process_gets_the_port_before_it_is_used(monkeypatch):
    store = EnvStore()
    torch = ModuleType("torch")
    torch.distributed = ModuleType("torch.distributed")
    torch.distributed.rendezvous = lambda _url: iter([(store, 0, 2)])
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", torch.distributed)
    monkeypatch.setattr(agent, "_stores", [])
    for name in agent._OF_EVERY_WORKER:
        monkeypatch.setenv(name, "127.0.0.1" if name == "MASTER_ADDR" else "0")
    place = agent._place_of_restarted_workers.__wrapped__()
    port = place.rendezvous.port
    assert store[agent._PLACE_KEY].startswith(str(port).encode())
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    for host in ("127.0.0.1", "0.0.0.0", "::"):
        server = _core.CoordinationServer([(host, port)], run_id="job")
        assert server.port == port
        server.close()
    for held in agent._stores[:-1]:
        held.close()
