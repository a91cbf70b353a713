"""The API of events: torch's names, signatures and JSON, and the destinations that elasticrs adds."""

import errno
import json
import logging
import os
import socket
import sys
import time

import pytest

from elasticrs import events
from elasticrs.events import api, handlers
from elasticrs.events.api import Event, EventSource, NodeState, RdzvEvent


class Listener(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def listener(monkeypatch):
    monkeypatch.setattr(events, "_events_loggers", {})
    monkeypatch.setattr(handlers, "_log_handlers", dict(handlers._log_handlers))
    listener = Listener()
    yield listener
    for name in ("mine", "dynamic_rendezvous"):
        logging.getLogger(f"torchelastic-events-{name}").removeHandler(listener)


def test_an_event_survives_serialization_to_json():
    event = Event("a", EventSource.WORKER, 5, {"number": 1, "nothing": None, "text": "ü"})
    assert Event.deserialize(event.serialize()) == event
    assert Event.deserialize(event) is event
    assert str(event) == event.serialize()
    assert list(json.loads(event.serialize())) == ["name", "source", "timestamp", "metadata"]
    meeting = RdzvEvent("a", "job", "said", "host", 7, NodeState.RUNNING, rank=1)
    assert RdzvEvent.deserialize(meeting.serialize()) == meeting
    assert RdzvEvent.deserialize(meeting) is meeting


@pytest.mark.parametrize(
    ("text", "error"), [("{}", KeyError), ("no", ValueError), ('{"source": "AGENT", "x": 1}', TypeError)]
)
def test_an_invalid_event_is_refused(text, error):
    with pytest.raises(error):
        Event.deserialize(text)


def test_the_text_of_an_event_is_as_in_torch(torch_programs):
    program = """
import importlib, sys
events = importlib.import_module(sys.argv[1])
print(events.Event("a", events.EventSource.AGENT, 5, {"x": [1, None], "u": "\\u00fc"}))
"""
    modules = ("elasticrs.events", "torch.distributed.elastic.events")
    ours, torchs = (torch_programs.checked(program, module) for module in modules)
    assert ours == torchs
    assert handlers._log_handlers.keys() >= {"console", "dynamic_rendezvous", "null"}


def test_an_event_gets_its_timestamp_when_it_is_recorded(listener):
    handlers._log_handlers["mine"] = listener
    before = time.time_ns() // 1_000_000
    mine = Event("a", EventSource.AGENT)
    events.record(mine, "mine")
    events.record(Event("b", EventSource.AGENT, timestamp=5), "mine")
    first, second = map(json.loads, listener.lines)
    assert before <= first["timestamp"] <= time.time_ns() // 1_000_000
    assert second["timestamp"] == 5
    assert mine.timestamp == 0


def test_the_console_handler_writes_bare_json(capsys):
    handlers.ConsoleHandler().handle(logging.makeLogRecord({"msg": "{}"}))
    assert capsys.readouterr().err == "{}\n"


def test_failure_events_in_a_file_are_synced_to_disk(listener, tmp_path, monkeypatch):
    path, synced = tmp_path / "events", []
    monkeypatch.setattr(os, "fsync", synced.append)
    destination = f"file:{path}"
    events.record(Event("a", EventSource.AGENT, 5, {"state": "START"}), destination)
    assert path.read_text().count("\n") == 1
    assert not synced
    events.record(Event("a", EventSource.WORKER, 5, {"state": "FAILED"}), destination)
    assert path.read_text().count("\n") == 2
    assert len(synced) == 1
    for name in ("timer expired", "worker hung", "kill worker process", "watchdog stopped"):
        events.record(Event(name, EventSource.AGENT, 5, {"state": "RUNNING"}), destination)
    assert len(synced) == 4
    handlers._log_handlers[destination].close()


def test_a_full_disk_under_an_event_file_is_reported_once(listener, caplog):
    destination = "file:/dev/full"
    for _ in range(3):
        events.record(Event("a", EventSource.AGENT, 5), destination)
    said = [record.getMessage() for record in caplog.records if record.name == "elasticrs.events"]
    (line,) = said
    assert line.endswith(f" /dev/full: {os.strerror(errno.ENOSPC)}")
    handlers._log_handlers[destination].close()


def test_an_event_fifo_without_a_reader_is_refused_and_a_full_fifo_never_blocks(listener, tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises(OSError, match="No such device"):
        events.get_logging_handler(f"file:{path}")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    handler = events.get_logging_handler(f"file:{path}")
    record = logging.makeLogRecord({"msg": "x" * 4000})
    for _ in range(100):
        handler.handle(record)
    os.close(reader)
    handler.close()


@pytest.fixture
def behind(tmp_path, listener):
    """A handler whose writes block until a reader opens the FIFO ``gate``."""
    handler = events.get_logging_handler(f"file:{tmp_path / 'events'}")
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    write = handler._write

    def slow(line, is_failure):
        if not handler.was_open:
            os.close(os.open(fifo, os.O_WRONLY))
            handler.was_open = True
        write(line, is_failure)

    handler.was_open, handler._write, handler.gate = False, slow, fifo
    handler.write_behind()
    yield handler
    handler.close()


def lines_of(handler):
    with open(handler._path, encoding="utf-8") as file:
        return file.read().splitlines()


def test_the_writer_thread_writes_all_event_lines_in_order(behind):
    for number in range(1000):
        behind.handle(logging.makeLogRecord({"msg": str(number)}))
    assert lines_of(behind) == []
    os.close(os.open(behind.gate, os.O_RDONLY))
    behind.write_through()
    assert lines_of(behind) == [str(number) for number in range(1000)]
    # The background thread has exited, so the handler writes directly again.
    behind.handle(logging.makeLogRecord({"msg": "last"}))
    assert lines_of(behind)[-1] == "last"


def test_event_lines_beyond_the_queue_limit_are_dropped_and_reported_once(behind, monkeypatch, caplog):
    monkeypatch.setattr(handlers, "MOST", 3)
    for number in range(9):
        behind.handle(logging.makeLogRecord({"msg": str(number)}))
    os.close(os.open(behind.gate, os.O_RDONLY))
    behind.write_through()
    assert lines_of(behind) == ["0", "1", "2"]
    assert len([record for record in caplog.records if record.name == "elasticrs.events"]) == 1


def test_a_forked_child_writes_its_own_event_lines(behind):
    behind.handle(logging.makeLogRecord({"msg": "parent"}))
    child = os.fork()
    if child == 0:
        behind.was_open = True
        behind.handle(logging.makeLogRecord({"msg": "child"}))
        behind.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert lines_of(behind) == ["child"]
    os.close(os.open(behind.gate, os.O_RDONLY))
    behind.write_through()
    assert lines_of(behind) == ["child", "parent"]


def test_the_writer_thread_runs_until_the_last_of_two_agents_ends(behind):
    behind.write_behind()
    os.close(os.open(behind.gate, os.O_RDONLY | os.O_NONBLOCK))
    behind.was_open = True
    behind.write_through()
    behind.handle(logging.makeLogRecord({"msg": "a"}))
    assert behind._behind is not None
    behind.write_through()
    assert behind._behind is None
    assert lines_of(behind) == ["a"]


def test_a_rendezvous_event_names_its_caller(listener, monkeypatch):
    asked = []
    monkeypatch.setattr(events, "fq_hostname", lambda: asked.append(1) or "here")
    events.construct_and_record_rdzv_event("job", "nobody listens", NodeState.RUNNING)
    assert not asked
    handlers._log_handlers["dynamic_rendezvous"] = listener
    try:
        raise ValueError("lost")
    except ValueError:
        events.construct_and_record_rdzv_event("job", "failed", NodeState.FAILED)
    event = RdzvEvent.deserialize(listener.lines[0])
    caller = sys._getframe().f_code.co_name
    assert event.name == f"{os.path.basename(__file__)}:{caller}"
    assert (event.hostname, event.pid) == ("here", os.getpid())
    assert "ValueError: lost" in event.error_trace


def test_the_host_name_is_resolved_once_with_a_time_limit(monkeypatch):
    monkeypatch.setattr(api, "_known", {})
    asked = []
    monkeypatch.setattr(socket, "getfqdn", lambda: asked.append(1) or "name.of.this.host")
    assert [api.fq_hostname() for _ in range(3)] == ["name.of.this.host"] * 3
    assert len(asked) == 1

    from threading import Event as Flag

    answers = Flag()
    monkeypatch.setattr(api, "_known", {})
    monkeypatch.setattr(api, "PATIENCE", 0.01)
    monkeypatch.setattr(socket, "getfqdn", answers.wait)
    assert api.fq_hostname() == os.uname().nodename
    answers.set()
