"""Tests for the exchange of ranks between agents over a store, with torch's keys and JSON format."""

import json

import pytest

from elasticrs._engine.job.ranks import NodeShare, node_ranks
from elasticrs.agent.server.simple_elastic_agent import begin_exit_barrier, exchange_ranks

SHARES = [NodeShare("trainer", 2), NodeShare("reader", 1), NodeShare("trainer", 3)]


class Store:
    """A fake of torch's store that never blocks. The tests call it in an order in which no call has
    to wait.
    """

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def multi_get(self, keys):
        return [self.values[key] for key in keys]

    def multi_set(self, keys, values):
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key, amount):
        self.set(key, str(int(self.values.get(key, b"0")) + amount))
        return int(self.values[key])

    def check(self, keys):
        return all(key in self.values for key in keys)


def test_rank_0_assigns_ranks_from_all_roles():
    store = Store()
    for rank in (2, 1):
        with pytest.raises(KeyError, match=f"assigned_ranks/{rank}"):
            exchange_ranks(store, rank, 3, SHARES[rank])
    found = [exchange_ranks(store, rank, 3, SHARES[rank]) for rank in range(3)]
    assert found == node_ranks(SHARES)
    # Check that the format is torch's, because other agents in the round may run torchrun.
    info = json.loads(store.values["torchelastic/role_info/2"])
    assert info == {"role": "trainer", "rank": 2, "local_world_size": 3}
    assert json.loads(store.values["torchelastic/assigned_ranks/2"]) == [3, 6, 2, 5]


def test_the_last_agent_opens_the_exit_barrier():
    store = Store()
    last_key = begin_exit_barrier(store, 2)
    assert not store.check([last_key])
    assert begin_exit_barrier(store, 2) == last_key
    assert store.check([last_key])
    assert set(store.values) == {
        "torchelastic/agent/terminal_state/num_members",
        "torchelastic/agent/terminal_state/last_member",
    }
