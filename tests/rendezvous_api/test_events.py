"""Events that the rendezvous records when it uses a custom back end."""

import logging
import os

import pytest
from helpers.said import says

from elasticrs.events import NodeState, RdzvEvent, _events_loggers, handlers
from elasticrs.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
    c10d_rendezvous_backend,
)
from elasticrs.rendezvous.c10d_rendezvous_backend import create_backend, create_file_backend
from elasticrs.rendezvous.dynamic.actions import Action
from elasticrs.rendezvous.dynamic.recording import Recorder
from elasticrs.rendezvous.dynamic.rendezvous_state import Node, Place, Standing, State
from elasticrs.rendezvous.dynamic_rendezvous import create_handler
from elasticrs.store.file_store import FileStore

from .backends import MemoryBackend


class Listener(logging.Handler):
    def __init__(self):
        super().__init__()
        self.events = []

    def emit(self, record):
        self.events.append(RdzvEvent.deserialize(record.getMessage()))


@pytest.fixture
def told(monkeypatch):
    listener = Listener()
    monkeypatch.setitem(handlers._log_handlers, "dynamic_rendezvous", listener)
    _events_loggers.pop("dynamic_rendezvous", None)
    yield listener.events
    logger = _events_loggers.pop("dynamic_rendezvous", None)
    if logger is not None:
        logger.removeHandler(listener)


def params(**config):
    return RendezvousParameters("memory", "", "job", 1, 1, "here", **config)


def names(told):
    return [event.name.partition(":")[2].split(".") for event in told]


def test_a_round_and_its_end_are_recorded_under_the_names_of_torch(told, tmp_path):
    handler = create_handler(FileStore(str(tmp_path / "store")), MemoryBackend(), params())
    handler.next_rendezvous()
    assert handler.shutdown()
    assert [name for name in names(told) if name[-1] != "_keep_alive"] == [
        ["DynamicRendezvousHandler", "next_rendezvous"],
        ["_DistributedRendezvousOpExecutor", "_add_to_participants"],
        ["DynamicRendezvousHandler", "next_rendezvous"],
        ["_DistributedRendezvousOpExecutor", "_mark_rendezvous_closed"],
        ["DynamicRendezvousHandler", "_close"],
    ]
    ranks = [event.rank for event in told if event.name.endswith("next_rendezvous")]
    assert ranks == [None, 0]
    assert {(event.run_id, event.hostname, event.local_id) for event in told} == {
        ("job", "here", handler._this_node.local_id)
    }
    assert told[-1].node_state is NodeState.SUCCEEDED


def test_a_rendezvous_error_is_recorded_with_its_traceback(told, tmp_path):
    backend = MemoryBackend()
    backend.value, backend.token = b"[]", 1
    handler = create_handler(FileStore(str(tmp_path / "store")), backend, params())
    with pytest.raises(RendezvousStateError) as raised:
        handler.next_rendezvous()
    assert told[-1].node_state is NodeState.FAILED
    assert str(raised.value) in told[-1].message
    assert told[-1].error_trace.startswith("Traceback")


def test_a_failure_to_create_a_handler_or_backend_is_recorded(told, tmp_path):
    with pytest.raises(ValueError, match="join_timeout"):
        create_handler(None, MemoryBackend(), params(join_timeout="soon"))
    parameters = RendezvousParameters("c10d", str(tmp_path / "none" / "file"), "job", 1, 1, store_type="file")
    with pytest.raises(Exception, match="file creation"):
        create_file_backend(parameters)
    assert [event.node_state for event in told] == [NodeState.FAILED] * 2
    assert [name[-1] for name in names(told)] == ["create_handler", "create_backend"]


def test_the_host_of_a_store_is_recorded(told, tmp_path, monkeypatch):
    store = FileStore(str(tmp_path / "file"))
    monkeypatch.setitem(vars(c10d_rendezvous_backend), "TCPStore", lambda *_, **__: store)
    backend, _ = create_backend(RendezvousParameters("c10d", "127.0.0.1:0", "job", 1, 1, is_host=True))
    assert backend.name == "c10d"
    (event,) = told
    assert event.node_state is NodeState.INIT
    says(event.message, str(os.getpid()), "hosts")


@pytest.mark.parametrize(
    ("action", "place", "name"),
    [
        (Action.PARTICIPATE, None, "_add_to_participants"),
        (Action.WAIT, None, "_add_to_wait_list"),
        (Action.BE_REDUNDANT, None, "_add_to_redundancy_list"),
        (Action.NO_LONGER_REDUNDANT, Place.REDUNDANT, "_remove_from_redundancy_list"),
        (Action.LEAVE, Place.PARTICIPANT, "_remove_from_participants"),
        (Action.LEAVE, Place.WAITING, "_remove_from_wait_list"),
        (Action.COMPLETE, Place.PARTICIPANT, "_mark_rendezvous_complete"),
        (Action.CLOSE, None, "_mark_rendezvous_closed"),
        (Action.KEEP_ALIVE, Place.WAITING, "_keep_alive"),
    ],
)
def test_each_state_change_has_the_event_name_of_torch(told, action, place, name):
    node = Node("a", 1, 2)
    state = State(nodes={} if place is None else {node: Standing(place, 1)})
    Recorder("job", node).acts(action, state)
    assert names(told) == [["_DistributedRendezvousOpExecutor", name]]


def test_nodes_that_missed_their_keep_alives_are_recorded_once(told):
    recorder = Recorder("job", Node("a", 1, 2))
    recorder.lost([])
    recorder.lost([Node("b", 3, 4), Node("c", 5, 6)])
    (event,) = told
    says(event.message, "b_3_4, c_5_6", "removed")


def test_no_event_logger_is_created_without_a_log_handler(tmp_path):
    backend = MemoryBackend()
    backend.trouble = ["refused"]
    handler = create_handler(FileStore(str(tmp_path / "store")), backend, params())
    with pytest.raises(RendezvousConnectionError):
        handler.next_rendezvous()
    assert "dynamic_rendezvous" not in _events_loggers
