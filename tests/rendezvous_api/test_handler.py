"""The handler with a custom back end: its results, settings and names, and invalid states in the back end."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from elasticrs.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
)
from elasticrs.rendezvous.dynamic import actions
from elasticrs.rendezvous.dynamic.rendezvous_settings import RendezvousSettings, RendezvousTimeout
from elasticrs.rendezvous.dynamic.rendezvous_state import (
    MAX_BYTES,
    Node,
    Place,
    Standing,
    State,
    decode,
    encode,
)
from elasticrs.rendezvous.dynamic.turns import LONGEST_PAUSE, Operation, SharedState
from elasticrs.rendezvous.dynamic_rendezvous import create_handler
from elasticrs.store.file_store import FileStore

from .backends import MemoryBackend


def params(**config):
    return RendezvousParameters("memory", "", "job", 1, 1, "here", **config)


@pytest.fixture
def make(tmp_path):
    made = []

    def handler(backend, **config):
        made.append(create_handler(FileStore(str(tmp_path / "store")), backend, params(**config)))
        return made[-1]

    yield handler
    for each in made:
        each._stop_heartbeats()
        each._release()


def test_each_round_has_its_own_keys_and_a_fresh_store(make):
    handler = make(MemoryBackend(), last_call_timeout=0.1)
    first = handler.next_rendezvous()
    assert (first.rank, first.world_size, first.bootstrap_store_info.master_addr) == (0, 1, "here")
    first.store.set("key", "value")
    second = handler.next_rendezvous()
    assert not second.store.check(["key"])
    assert second.bootstrap_store_info.master_port != first.bootstrap_store_info.master_port
    assert (handler.num_nodes_waiting(), handler.is_closed(), handler.get_run_id()) == (0, False, "job")
    assert handler.shutdown()
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError, match=r"closed: node here_\d+_\d+"):
        handler.next_rendezvous()


def test_disabled_store_sharing_makes_rank_0_host_the_store(make, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    handler = make(MemoryBackend())
    assert not handler.use_agent_store
    assert handler.next_rendezvous().bootstrap_store_info.master_port > 0
    assert handler.shutdown()


def test_a_short_loss_of_the_backend_does_not_end_the_round(make):
    backend = MemoryBackend()
    handler = make(backend, keep_alive_interval=30)
    handler.next_rendezvous()
    handler._look_again = 0.0
    backend.trouble = ["refused"]
    assert handler.num_nodes_waiting() == 0
    assert backend.trouble == []
    # Pretend that the last successful access is so long ago that the other nodes consider this one dead.
    handler._look_again, handler._shared.synced = 0.0, -1000.0
    backend.trouble = ["refused"]
    with pytest.raises(RendezvousConnectionError):
        handler.num_nodes_waiting()
    backend.trouble = ["refused"]
    assert not handler.shutdown()


class MuteBackend(MemoryBackend):
    """A back end whose ``set_state`` returns nothing, which torch allows."""

    def set_state(self, state, token=None):
        super().set_state(state, token)


def test_a_backend_whose_set_state_returns_none_is_read_again(make):
    backend = MuteBackend()
    handler = make(backend, last_call_timeout=0.1)
    assert handler.next_rendezvous().rank == 0
    assert handler.next_rendezvous().rank == 0
    assert handler.shutdown()


def test_a_keep_alive_without_a_reply_is_sent_once(make):
    backend = MuteBackend()
    handler = make(backend, last_call_timeout=0.1)
    handler.next_rendezvous()
    writes = backend.writes
    handler._shared._wrote_at -= 1000.0
    handler._shared._beat_at -= 1000.0
    handler._keep_alive()
    handler._keep_alive()
    assert backend.writes == writes + 1
    assert handler.shutdown()


class ForgetfulBackend(MuteBackend):
    """Backend that discards every state it is given."""

    def set_state(self, *_):
        self.writes += 1


def test_a_backend_that_stores_nothing_is_retried_with_pauses():
    backend = ForgetfulBackend()
    settings = RendezvousSettings("job", 1, 1, RendezvousTimeout(), timedelta(seconds=5), 3)
    shared = SharedState(backend, settings, Node("here", 1, 0))
    operation = Operation(shared, actions.join, 600.0)
    pauses = [operation.turn() for _ in range(40)]
    assert backend.writes == 20
    assert sum(pauses) > 10 * LONGEST_PAUSE


@pytest.fixture
def pair(make):
    """Two handlers in one round. The second one reads the back end at its next call, without waiting for its
    interval.
    """
    backend = MemoryBackend()
    handlers = [make(backend), make(backend)]
    for each in handlers:
        each._settings = each._shared.settings = RendezvousSettings(
            "job", 2, 2, RendezvousTimeout(), timedelta(seconds=30), 3
        )
    with ThreadPoolExecutor(2) as threads:
        for joined in [threads.submit(each.next_rendezvous) for each in handlers]:
            joined.result()
    handlers[1]._look_again = 0.0
    return handlers


def test_a_job_that_failed_on_another_node_is_closed_on_this_node(pair):
    first, second = pair
    first.set_failed("rank 0: exit code 3")
    assert first.shutdown()
    assert (second.is_closed(), second.num_nodes_waiting()) == (True, 1)
    with pytest.raises(RendezvousClosedError, match=r"rank 0: exit code 3$"):
        second.next_rendezvous()
    # After the error, the node belongs to no round.
    assert second.num_nodes_waiting() == 0


@pytest.mark.parametrize("has_succeeded", [True, False])
def test_a_leaving_node_does_not_end_the_round_of_other_nodes(pair, has_succeeded):
    first, second = pair
    if has_succeeded:
        first.set_succeeded()
    assert first.shutdown()
    assert (second.is_closed(), second.num_nodes_waiting()) == (True, 0)


def test_a_node_outside_the_round_cannot_end_the_round(make):
    backend = MemoryBackend()
    inside, outside = make(backend), make(backend)
    inside.next_rendezvous()
    outside.set_failed("it was never needed")
    assert outside.shutdown()
    inside._look_again = 0.0
    assert (inside.is_closed(), inside.num_nodes_waiting()) == (True, 0)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x80\x04K\x01.", "not written"),
        (b"[]", "not written"),
        (b"[" * 100_000, "not written"),
        (encode(State()).replace(b'"version":1', b'"version":2'), "version 2, .* 1"),
        (encode(State()).replace(b'"round":0', b'"round":-1'), "damaged"),
        (encode(State()).replace(b'"nodes":[]', b'"nodes":[["a",1]]'), "damaged"),
        (b" " * (MAX_BYTES + 1), f"{MAX_BYTES + 1} bytes"),
    ],
)
def test_a_backend_state_of_another_program_is_refused(make, data, text):
    backend = MemoryBackend()
    backend.value, backend.token = data, 1
    with pytest.raises(RendezvousStateError, match=text):
        make(backend).next_rendezvous()


def test_a_backend_state_decodes_as_it_was_encoded():
    nodes = {Node("a", 1, 2): Standing(Place.PARTICIPANT, 3, 0), Node("b", 4, 5): Standing(Place.WAITING, 6)}
    state = State(7, 1, None, 8, "why", nodes, has_failed=True)
    assert decode(encode(state)) == state


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"join_timeout": "soon"}, "'join_timeout'.*'soon'"),
        ({"join_timeout": "inf"}, "'join_timeout'.*'inf'"),
        ({"close_timeout": -1}, "close timeout .*-1"),
        ({"keep_alive_interval": 0}, "keep_alive_interval .*0"),
        ({"keep_alive_max_attempt": 0}, "keep_alive_max_attempt .*0"),
        ({"keep_alive_max_attempt": "x"}, "'keep_alive_max_attempt'"),
        ({"cas_backoff_max_seconds": "x"}, "cas_backoff_max_seconds.*x"),
        ({"cas_backoff_max_seconds": -1}, "cas_backoff_max_seconds.*-1"),
        ({"cas_backoff_max_seconds": "nan"}, "cas_backoff_max_seconds.*nan"),
    ],
)
def test_invalid_settings_are_refused(make, config, text):
    with pytest.raises(ValueError, match=text):
        make(MemoryBackend(), **config)


def test_timeouts_accept_fractions_of_seconds(make):
    settings = make(MemoryBackend(), last_call_timeout="0.25", keep_alive_interval=0.5).settings
    assert settings.timeout.last_call == timedelta(seconds=0.25)
    assert settings.keep_alive_interval == timedelta(seconds=0.5)
    assert settings.timeout.join == timedelta(seconds=600)


def test_a_node_that_waits_for_a_full_round_becomes_a_spare():
    me, other = Node("me", 1, 0), Node("other", 1, 0)
    settings = RendezvousSettings("job", 1, 1, RendezvousTimeout(), timedelta(seconds=5), 3)
    nodes = {other: Standing(Place.PARTICIPANT, 1, 0), me: Standing(Place.WAITING, 1)}
    view = actions.View(me, State(1, 1, None, 0, None, nodes), 0.0, False, None, settings)
    assert actions.join(view, 10.0) is actions.Action.BE_REDUNDANT
    assert actions.waiting(view.state, settings) == 0


def test_ranks_follow_the_natural_order_of_node_names():
    settings = RendezvousSettings("job", 3, 3, RendezvousTimeout(), timedelta(seconds=5), 3)
    state = State()
    for name in ("node10", "node9", "node2"):
        state = actions.apply(actions.Action.PARTICIPATE, state, Node(name, 1, 0), 1, settings)
    assert {node.addr: each.rank for node, each in state.nodes.items()} == {
        "node2": 0,
        "node9": 1,
        "node10": 2,
    }


PROGRAM = """
from torch.distributed.elastic.rendezvous import utils as theirs
from elasticrs.rendezvous import utils as ours
def said(module, name, *args):
    try:
        return getattr(module, name)(*args)
    except ValueError as error:
        return str(error)
for each in ["h:1", "[::1]", "[::1]:7", "::1", "h", "", None, " h:2 ", "h:65536", "h:x", "a b"]:
    one, other = (said(module, "parse_rendezvous_endpoint", each, 5) for module in (theirs, ours))
    assert one == other, (each, one, other)
for each in ["", "a=1", " a = 1 ,b=2=3", "=1", "a", "a=", "a=1,"]:
    one, other = (said(module, "_parse_rendezvous_config", each) for module in (theirs, ours))
    assert one == other, (each, one, other)
# The back end on torch's own store.
from datetime import timedelta
import torch.distributed as dist
from elasticrs.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from elasticrs.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
store = dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=10))
handler = DynamicRendezvousHandler.from_backend("job", store, C10dRendezvousBackend(store, "job"), 1, 1)
info = handler.next_rendezvous()
assert isinstance(info.store, dist.PrefixStore) and handler.get_backend() == "c10d"
assert handler.shutdown() and handler.is_closed()
# At times torch's store aborts the interpreter's own way out.
import os
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.torch
def test_texts_are_torchs_and_its_store_serves(torch_programs):
    torch_programs.checked(PROGRAM)
