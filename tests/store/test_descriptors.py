"""A store leaves its process some descriptors, however many clients connect."""

import os
import re
import resource
import socket
import subprocess
import sys

import pytest
from helpers import procs
from helpers.coordination import RawClient
from helpers.http_client import get
from helpers.torch_clients import GREETING

LIMIT = 80
HELLO = RawClient.greeting()

SERVE = """
import sys
from elasticrs import _core
store = {store}
sys.stdout.write(f"{{store.port}}\\n")
sys.stdout.flush()
sys.stdin.read()
store.close()
sys.stdout.write("\\n".join(store.take_notices()))
"""
STORES = {
    "workers": ("_core.WorkerStore('127.0.0.1'); store.serve()", GREETING, 34),
    "coordination": ("_core.CoordinationServer([('127.0.0.1', 0)], run_id=None)", HELLO, 24),
}
"""For each kind of store: the code that starts it, the first bytes of a client, and the number of descriptors
that the store leaves free.
"""


def descriptors(process, is_enough):
    """Return the number of open descriptors as soon as it satisfies ``is_enough``."""
    return procs.wait_until(lambda: len(os.listdir(f"/proc/{process.pid}/fd")), is_enough)


@pytest.mark.parametrize("kind", STORES)
def test_client_connections_never_use_the_last_file_descriptors(kind):
    code, greeting, kept = STORES[kind]
    command = [sys.executable, "-c", SERVE.format(store=code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        alone = descriptors(process, bool)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * LIMIT)]
        # One more connection is accepted, but held back until there is room.
        for each in crowd:
            each.sendall(greeting)
        most = descriptors(process, lambda count: count > LIMIT - kept)
        assert most == LIMIT - kept + 1
        for each in crowd:
            each.close()
        # The waiting connections were accepted, and dropped because their clients had closed them.
        descriptors(process, lambda count: count <= alone)
        told, _ = process.communicate("")
    # The error is reported at most once in ten seconds.
    assert 0 < len(re.findall("cannot accept .*Too many open files", told)) < 3, told


SERVE_HEALTH = """
import sys
from elasticrs import _core
store = _core.WorkerStore('127.0.0.1')
store.serve()
health = _core.HealthServer('127.0.0.1', 0, 60.0)
sys.stdout.write(f"{store.port} {health.port}\\n")
sys.stdout.flush()
sys.stdin.read()
store.close()
health.close()
"""


def test_a_full_store_leaves_file_descriptors_for_the_health_check():
    command = [sys.executable, "-c", SERVE_HEALTH]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        store, health = map(int, process.stdout.readline().split())
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        crowd = [socket.create_connection(("127.0.0.1", store)) for _ in range(2 * LIMIT)]
        for each in crowd:
            # Send a greeting, because the store disconnects a silent client after a while.
            each.sendall(GREETING)
        descriptors(process, lambda count: count > LIMIT - STORES["workers"][2])
        assert get(health, "/")[0] == 200
        for each in crowd:
            each.close()
        process.communicate("")
