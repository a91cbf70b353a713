"""Workers whose script sets ``MASTER_ADDR`` and ``MASTER_PORT`` to the endpoint of the rendezvous."""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from helpers import procs
from helpers.coordination import Client, Server, serving
from helpers.said import says
from helpers.torch_clients import GREETING

from elasticrs import _core


@contextmanager
def workers_store() -> Iterator[_core.WorkerStore]:
    store = _core.WorkerStore("127.0.0.1")
    store.serve()
    try:
        yield store
    finally:
        store.close()


def worker(port: int, pid: int) -> socket.socket:
    """Return the connection of a worker that has sent its greeting."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=procs.HANG)
    sock.sendall(GREETING + b"\r" + struct.pack("<I", pid))
    return sock


def add(sock: socket.socket) -> int:
    sock.sendall(b"\x04" + struct.pack("<Q", 1) + b"n" + struct.pack("<q", 1))
    return int.from_bytes(sock.recv(8, socket.MSG_WAITALL), "little")


def is_served(sock: socket.socket) -> bool:
    """Return true if the store has answered the greeting, and false if it has closed the connection."""
    return len(sock.recv(4, socket.MSG_WAITALL)) == 4


@pytest.mark.parametrize("token", [None, b"secret"])
def test_a_worker_at_the_endpoint_uses_the_store_of_the_current_round(token):
    with serving(token=token) as store, workers_store() as first, workers_store() as second:
        # A worker may connect before the agent knows the address of the workers' store.
        store.inner.lead_workers(None)
        early = worker(store.port, os.getpid())
        store.inner.lead_workers(("127.0.0.1", first.port))
        assert is_served(early)
        assert add(early) == 1
        assert add(early) == 2
        store.inner.lead_workers(("localhost", second.port), os.getpid())
        with worker(store.port, os.getpid()) as late:
            assert is_served(late)
            assert add(late) == 1
        first.close()
        assert not early.recv(1)
        early.close()
        assert store.inner.take_notices() == []


def test_a_worker_of_another_job_is_refused_with_one_notice():
    with serving() as store, workers_store() as workers:
        store.inner.lead_workers(("127.0.0.1", workers.port), os.getpid())
        for _ in range(20):
            with worker(store.port, 1) as stranger:
                assert not is_served(stranger)
        (line,) = store.inner.take_notices()
        says(line, "no worker of this job", "MASTER_ADDR", "MASTER_PORT")


def announced(store: Server, run_id: str, port: int) -> Client:
    """Return an agent that has announced the workers' store of its job."""
    agent = Client(store.port, run_id=run_id).connected()
    agent.put(f"%workers/{run_id}", f"127.0.0.1 {port}".encode(), leased=True)
    return agent


def test_a_store_of_all_jobs_passes_on_the_workers_of_the_only_job_of_a_machine():
    with serving(run_id=None) as store, workers_store() as first, workers_store() as second:
        agent = announced(store, "a", first.port)
        with worker(store.port, os.getpid()) as own:
            assert is_served(own)
            assert add(own) == 1
        # In the next round, another agent of the job has group rank 0.
        other = Client(store.port, run_id="a").connected()
        other.put("%workers/other", f"127.0.0.1 {second.port}".encode(), leased=True)
        with worker(store.port, os.getpid()) as own:
            assert is_served(own)
            assert add(own) == 1
            assert add(own) == 2
        agent.close()
        other.close()
        assert store.inner.take_notices() == []


def test_a_store_of_all_jobs_does_not_guess_the_job_of_a_worker():
    with serving(run_id=None) as store, workers_store() as workers:
        agents = [announced(store, run_id, workers.port) for run_id in "ab"]
        for _ in range(3):
            with worker(store.port, os.getpid()) as own:
                assert not is_served(own)
        (line,) = store.inner.take_notices()
        says(line, "several jobs", "MASTER_ADDR", "MASTER_PORT")
        agents[0].close()
        procs.wait_until(store.inner.sessions, lambda count: count == 1)
        with worker(store.port, os.getpid()) as own:
            assert is_served(own)
        agents[1].close()


@pytest.mark.parametrize("value", [b"", b"127.0.0.1", b"127.0.0.1 70000", b"\xff 1", b"a b c"])
def test_a_damaged_announcement_serves_no_worker(value):
    with serving(run_id=None) as store:
        agent = Client(store.port, run_id="a").connected()
        agent.put("%workers/a", value, leased=True)
        with worker(store.port, os.getpid()) as own:
            assert not is_served(own)
        agent.put("key")
        agent.close()


def test_the_probe_for_a_torch_store_is_not_passed_on():
    with serving() as store, workers_store() as workers:
        store.inner.lead_workers(("127.0.0.1", workers.port))
        with socket.create_connection(("127.0.0.1", store.port), timeout=procs.HANG) as probe:
            probe.sendall(GREETING + b"\x07")
            assert not probe.recv(8)
        assert store.inner.take_notices() == []


def test_closing_the_store_closes_the_connections_of_its_workers():
    with workers_store() as workers:
        server = Server()
        server.inner.lead_workers(("127.0.0.1", workers.port))
        with worker(server.port, os.getpid()) as own:
            assert is_served(own)
            closed = server.inner
            closed.close()
            # The thread of the workers' store keeps the connection open until the workers' store closes it.
            workers.close()
            assert not own.recv(1)
        server.close()
