"""Tests for torch's utilities: store operations, samplers, macros, loggers and ports."""

import socket
import subprocess
import sys
from datetime import timedelta

import pytest

from elasticrs.store import DistStoreError
from elasticrs.utils import get_env_variable_or_raise, macros
from elasticrs.utils import store as store_util
from elasticrs.utils.data import CyclingIterator
from elasticrs.utils.distributed import get_free_port, get_socket_with_port
from elasticrs.utils.logging import get_logger
from elasticrs.utils.process_state import is_uninterruptible_state, read_proc_state


class Store:
    """A fake store that records its calls. Waiting for a missing key fails immediately."""

    def __init__(self, **values):
        self.values, self.calls, self._timeout = dict(values), [], timedelta(seconds=7)

    @property
    def timeout(self):
        self.calls.append("timeout")
        return self._timeout

    def set_timeout(self, timeout):
        self.calls.append(f"set_timeout {timeout.total_seconds():g}")
        self._timeout = timeout

    def set(self, key, value):
        self.calls.append(f"set {key}")
        self.values[key] = value

    def add(self, key, amount):
        self.calls.append(f"add {key} {amount}")
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]

    def multi_get(self, keys):
        self.calls.append("multi_get " + " ".join(keys))
        return [self.values[key] for key in keys]

    def wait(self, keys, timeout=None):
        self.calls.append(" ".join(["wait", *keys, *([str(timeout.total_seconds())] if timeout else [])]))
        if not self.values.keys() >= set(keys):
            raise DistStoreError("too late")


def test_rank_0_reads_all_values_and_waits_for_the_other_ranks():
    store = Store(p1=b"one", **{"p/finished/num_members": 1})
    assert store_util.synchronize(store, b"zero", 0, 2, "p", timeout=5) == [b"zero", b"one"]
    assert store.calls == [
        "timeout", "set_timeout 5", "set p0", "multi_get p0 p1", "add p/finished/num_members 1",
        "set p/finished/last_member", "wait p/finished/last_member", "set_timeout 7",
    ]  # fmt: skip


def test_other_ranks_do_not_wait():
    store = Store(p0=b"zero")
    assert store_util.get_all(store, 1, "p", 1) == [b"zero"]
    assert store.calls == [
        "multi_get p0", "add p/finished/num_members 1", "set p/finished/last_member"
    ]  # fmt: skip


def test_a_barrier_uses_one_counter_and_one_key():
    store = Store()
    store_util.barrier(store, 1, "b", barrier_timeout=3)
    assert store.calls == [
        "timeout", "set_timeout 3", "add b/num_members 1", "set b/last_member", "wait b/last_member",
        "set_timeout 7",
    ]  # fmt: skip


def test_rank_0_names_the_missing_ranks():
    store = Store(**{"b2/TRACE": ""})
    with pytest.raises(
        DistStoreError, match=r"on rank 0, for key prefix: b .*missing_ranks=\[node1, node3\]"
    ):
        store_util.barrier(store, 4, "b", 3, 0, lambda rank: f"node{rank}", trace_timeout=2)
    assert store.calls[2:] == [
        "add b/num_members 1", "wait b/last_member", "set b0/TRACE", "wait b1/TRACE 2.0",
        "wait b2/TRACE 0.001", "wait b3/TRACE 0.001", "set b/TRACING_GATE", "set_timeout 7",
    ]  # fmt: skip


def test_other_ranks_refer_to_rank_0_for_the_missing_ranks():
    with pytest.raises(
        DistStoreError, match=r"missing_ranks=\[\[<check rank 0 \(0\) for missing rank info>\]\]"
    ):
        store_util.barrier(Store(**{"b/TRACING_GATE": ""}), 2, "b", rank=1)
    # Without rank 0, no rank finds out which ranks are missing, so the store's error is raised unchanged.
    with pytest.raises(DistStoreError, match=r"^too late$"):
        store_util.barrier(Store(), 2, "b", rank=1)
    with pytest.raises(DistStoreError, match=r"^too late$"):
        store_util.barrier(Store(), 2, "b")


def test_the_store_timeout_is_restored_after_an_error():
    store = Store()
    with pytest.raises(DistStoreError):
        store_util.barrier(store, 2, "b")
    assert store.timeout == timedelta(seconds=7)


def test_a_barrier_with_a_rank_decoder_requires_a_rank():
    with pytest.raises(AssertionError, match="rank information"):
        store_util.barrier(Store(), 1, "b", rank_tracing_decoder=str)


def test_macros_are_replaced_only_in_strings():
    assert macros.substitute(["--r=${local_rank}", "$x", 3], "7") == ["--r=7", "$x", 3]


def test_a_missing_environment_variable_raises_an_error(monkeypatch):
    monkeypatch.setenv("SOME_NAME", "x")
    assert get_env_variable_or_raise("SOME_NAME") == "x"
    monkeypatch.delenv("SOME_NAME")
    with pytest.raises(ValueError, match="SOME_NAME expected, but not set"):
        get_env_variable_or_raise("SOME_NAME")


def test_a_logger_has_its_module_name_and_the_level_from_loglevel(monkeypatch):
    monkeypatch.setenv("LOGLEVEL", "INFO")
    logger = get_logger()
    assert (logger.name, logger.level) == (__name__, 20)
    monkeypatch.delenv("LOGLEVEL")
    assert get_logger("some.name").level == 30


def test_a_bound_port_cannot_be_used_by_other_sockets():
    with get_socket_with_port() as bound, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("", bound.getsockname()[1]))
        with pytest.raises(ConnectionRefusedError):
            other.connect(("127.0.0.1", bound.getsockname()[1]))
    assert 0 < get_free_port() < 65536


def test_cycling_iterator_chains_several_epochs():
    epochs = {0: [1, 2], 1: [], 2: [3]}
    assert list(CyclingIterator(3, lambda epoch: iter(epochs[epoch]))) == [1, 2, 3]
    assert list(CyclingIterator(3, lambda epoch: iter(epochs[epoch]), start_epoch=2)) == [3]
    assert list(CyclingIterator(5000, lambda _: iter(()))) == []


def test_process_states_are_read_and_classified():
    assert read_proc_state(1) in set("RSDZTtIX")
    assert read_proc_state(2**22 + 1) is None
    assert [is_uninterruptible_state(state) for state in ("D", "D+", "S", None)] == [True, True, False, False]


# Run these programs in their own processes, because torch leaves threads running.
SAMPLER = """
from torch.distributed.elastic.utils.data import ElasticDistributedSampler as Theirs
from elasticrs.utils.data import ElasticDistributedSampler as Ours

data = list(range(23))
for rank in range(3):
    ours, theirs = Ours(data, 3, rank, 5), Theirs(data, 3, rank, 5)
    for sampler in (ours, theirs):
        sampler.set_epoch(2)
    assert list(ours) == list(theirs)
    assert len(ours) == len(theirs) == 6
# Fewer items than half the ranks: torch fails.
assert [list(Ours([0, 1], 5, rank, 1)) for rank in range(5)] == [[1]] * 5
try:
    Ours(data, 3, 0, 23)
except ValueError as error:
    assert "Start index 23 should be less than dataset size 23" in str(error)
else:
    raise AssertionError
"""

TCP_STORE = """
import torch.distributed as dist
from elasticrs.utils import store as store_util
from elasticrs.utils.distributed import create_c10d_store

def refused(kind, text, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)

needs_port = "server_port must be specified when world_size > 1"
refused(ValueError, needs_port, create_c10d_store, True, "localhost", world_size=2)
store = create_c10d_store(True, "localhost", timeout=10)
store.set("key", "value")
assert store.get("key") == b"value"
refused(dist.DistNetworkError, "already in use", create_c10d_store, True, "localhost", store.port, timeout=10)
# Its errors are understood, too.
missing = dict(barrier_timeout=0.1, rank=0, trace_timeout=0.1)
refused(dist.DistStoreError, "missing_ranks=[1]", store_util.barrier, store, 2, "b", **missing)
"""


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("program", [SAMPLER, TCP_STORE], ids=["sampler", "store"])
def test_utilities_behave_as_in_torch(torch_programs, program):
    torch_programs.checked(program)


def test_utilities_do_not_import_torch():
    program = "import sys, elasticrs.utils.data, elasticrs.utils.store, elasticrs.utils.distributed\n"
    program += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
