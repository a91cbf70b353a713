"""Queries to NCCL's RAS service. The answers are those of NCCL 2.28.9."""

import socket
import threading
import time

import pytest

from elasticrs.agent import ras
from elasticrs.agent.ras import MAX_BYTES, MAX_NOTES, RasAddress, RasQuery, query

ANSWER = """NCCL version 2.28.9 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          1            1          1        1

Communicators... (0.000s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         2         1         1         1         1   RUNNING      OK

Errors
======
{errors}
Warnings
========
{warnings}
"""
QUIET = ANSWER.format(errors="", warnings="")
LOUD = ANSWER.format(
    errors="INCOMPLETE\n  Missing data from 1 job process\n", warnings="TIMEOUT\n  1 process"
)
BEGIN = b"SERVER PROTOCOL 2\nOK\n"


class Service:
    """A fake RAS service. Passes ``play`` the connection, and an event that is set when the service is
    closed.
    """

    def __init__(self, play):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.requests, self._is_over = [], threading.Event()
        self._thread = threading.Thread(target=self._run, args=(play,))
        self._thread.start()

    def _run(self, play):
        connection, _ = self._listener.accept()
        with connection:
            self.requests.append(connection.recv(1000))
            play(connection, self._is_over)

    def close(self):
        self._is_over.set()
        self._thread.join()
        self._listener.close()


@pytest.fixture
def service():
    made = []

    def make(play):
        made.append(Service(play))
        return made[-1]

    yield make
    for each in made:
        each.close()


def answers(*parts):
    return lambda connection, _: [connection.sendall(part) for part in parts]


def hangs(_, is_over):
    is_over.wait()


def soon():
    return time.monotonic() + 30


def test_the_reply_of_the_ras_service_is_returned(service):
    fake = service(answers(b"SERVER PROTOCOL 2\n", b"OK\n", QUIET.encode()))
    assert query(fake.address, soon()) == QUIET
    assert fake.requests == [b"CLIENT PROTOCOL 2\nTIMEOUT 1\nVERBOSE STATUS\n"]


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"SERVER PROTOCOL 2\n"],
        [BEGIN],
        [b"SERVER PROTOCOL 2\nERROR unknown command\n"],
        [b"HTTP/1.1 400 Bad Request\r\n\r\n"],
        [bytes(range(256)) * 9],
    ],
)
def test_an_invalid_ras_reply_counts_as_no_reply(service, parts):
    assert query(service(answers(*parts)).address, soon()) is None


def test_a_query_to_a_hanging_ras_service_ends_at_the_deadline(service):
    assert query(service(hangs).address, time.monotonic() + 0.2) is None
    with socket.create_server(("127.0.0.1", 0)) as unused:
        assert query(unused.getsockname(), time.monotonic() - 1) is None


def test_a_partial_ras_reply_is_used(service):
    def play(connection, is_over):
        connection.sendall(BEGIN + b"NCCL version 2.28.9")
        is_over.wait()

    assert query(service(play).address, time.monotonic() + 2) == "NCCL version 2.28.9"


def test_an_endless_ras_reply_is_cut(service):
    def play(connection, is_over):
        try:
            connection.sendall(BEGIN)
            while not is_over.is_set():
                connection.sendall(b"x" * 65536)
        except OSError:
            return

    assert len(query(service(play).address, soon())) <= MAX_BYTES


def test_a_ras_query_returns_none_if_no_process_listens():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = unused.getsockname()
    assert query(address, soon()) is None


@pytest.fixture
def notes(service, tmp_path):
    def notes(text):
        fake = service(answers(BEGIN, text.encode()))
        asked = RasQuery(fake.address, str(tmp_path / "nccl_ras.txt"))
        asked.close()
        return asked.notes()

    return notes


def test_ras_errors_and_warnings_are_reported_and_the_reply_is_saved(notes, tmp_path):
    *found, where = notes(LOUD)
    assert found == [
        "NCCL's RAS: INCOMPLETE",
        "NCCL's RAS:   Missing data from 1 job process",
        "NCCL's RAS: TIMEOUT",
        "NCCL's RAS:   1 process",
    ]
    assert str(tmp_path / "nccl_ras.txt") in where
    assert (tmp_path / "nccl_ras.txt").read_text() == LOUD


def test_only_the_file_of_a_ras_reply_without_errors_is_reported(notes):
    (where,) = notes(QUIET)
    assert "nccl_ras.txt" in where


def test_ras_notes_are_short_and_printable(notes):
    lines = "\n".join(f"\x1b[31m {number} " + "y" * 900 for number in range(99))
    found = notes(ANSWER.format(errors=lines, warnings=""))
    assert len(found) == MAX_NOTES + 2
    assert all(note.isprintable() for note in found)
    assert all(len(note) < 2 * ras.MAX_NOTE for note in found[:-1])


def test_a_ras_file_that_cannot_be_written_leaves_no_note(service, tmp_path):
    fake = service(answers(BEGIN, LOUD.encode()))
    asked = RasQuery(fake.address, str(tmp_path / "missing" / "nccl_ras.txt"))
    asked.close()
    assert asked.notes() == []


def test_an_unanswered_ras_query_does_not_block(service, tmp_path, monkeypatch):
    monkeypatch.setattr(ras, "TIME_LIMIT", 0.2)
    asked = RasQuery(service(hangs).address, str(tmp_path / "nccl_ras.txt"))
    assert asked.notes() == []
    asked.close()
    asked.close()
    assert asked.notes() == []


# --- the address ---


def test_each_job_gets_a_ras_port_that_its_processes_can_share(tmp_path):
    one, other = RasAddress({}, driver=str(tmp_path)), RasAddress({}, driver=str(tmp_path))
    listeners = [socket.socket(), socket.socket()]
    try:
        assert one.variables == {"NCCL_RAS_ADDR": f"127.0.0.1:{one.address[1]}"}
        assert one.address != other.address
        for listener in listeners:
            # NCCL sets these options in each process.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(one.address)
            listener.listen()
        # The kernel passes a connection to one of the listening processes. The agent's socket gets none,
        # because it does not listen.
        with socket.create_connection(one.address, timeout=30):
            pass
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(other.address)
    finally:
        for each in (*listeners, one, other, one):
            each.close()


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("localhost:12345", ("localhost", 12345)),
        ("[::1]:9", ("::1", 9)),
        ("", None),
        ("localhost", None),
        (":9", None),
        ("localhost:x", None),
    ],
)
def test_a_ras_address_set_by_the_user_is_kept(tmp_path, given, address):
    own = RasAddress({"NCCL_RAS_ADDR": given}, driver=str(tmp_path))
    assert (own.address, own.variables) == (address, {})
    own.close()


def test_no_ras_address_is_set_without_a_gpu_driver(tmp_path):
    own = RasAddress({}, driver=str(tmp_path / "missing"))
    assert (own.address, own.variables) == (None, {})
