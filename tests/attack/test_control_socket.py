"""Programs of the same user that misuse the control socket of a job, and a job that does not notice it."""

import os
import signal
import socket
from contextlib import ExitStack, closing, suppress

import pytest
from helpers.elasticctl import WAITS, socket_of, status_of
from helpers.procs import wait_until

from elasticrs import ctl

pytestmark = pytest.mark.slow

STATUS = b"GET /status HTTP/1.1\r\n\r\n"
STOP = b"POST /do HTTP/1.1\r\nContent-Length: 13\r\n\r\n"


@pytest.fixture
def job(launch, worker_script, sockets):
    started = launch(worker_script(WAITS), env={"ELASTICRS_CONTROL_DIR": str(sockets)})
    pid = int(started.wait_for_line(r"here 0 (\d+)\.")[1])
    yield started, lambda: status_of(sockets, started), str(socket_of(sockets, started))
    os.kill(pid, signal.SIGUSR1)
    assert started.wait() == 0


def descriptors_of(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("sent", [b"", STATUS[:-2], STOP, STATUS], ids=["silent", "head", "body", "deaf"])
def test_a_thousand_connections_neither_stop_the_answers_nor_use_up_descriptors(job, sent):
    started, status, path = job
    wait_until(lambda: status()["state"], "HEALTHY".__eq__)
    before = descriptors_of(started.pid)
    with ExitStack() as clients:
        for number in range(1000):
            client = clients.enter_context(closing(socket.socket(socket.AF_UNIX)))
            client.connect(path)
            with suppress(BrokenPipeError):
                client.sendall(sent)
            if number % 100 == 0:
                assert status()["state"] == "HEALTHY"
                assert descriptors_of(started.pid) <= before + 20
        assert ctl.main(["ps"]) == 0
    wait_until(lambda: descriptors_of(started.pid), lambda now: now <= before)


def test_orders_that_nobody_waits_for_are_forgotten(job):
    started, status, path = job
    before = status()
    for _ in range(100):
        with closing(socket.socket(socket.AF_UNIX)) as client:
            client.connect(path)
            client.sendall(STOP + b"{")
    assert status()["workers"] == before["workers"]
    assert "elasticctl" not in started.stderr
