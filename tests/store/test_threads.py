"""The threads of stores and health checks: they block signals, survive SIGPIPE, and do not wait for each
other.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import procs
from helpers.coordination import Client, RawClient, get, transaction
from helpers.held import held, thread_of

from elasticrs import _core

PROGRAM = """
import signal, sys
from elasticrs import _core
# As in a command-line tool whose output may go to `head`.
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
server = _core.CoordinationServer([("127.0.0.1", 0)], run_id=None)
print(server.port, flush=True)
sys.stdin.read()
"""


def test_a_client_that_disconnects_before_its_replies_ends_no_other_session():
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        port = int(program.stdout.readline())
        # When the store resumes, all requests and the end of the connection have arrived. It writes its
        # replies, for which it needs several system calls, to a closed socket.
        client = RawClient(port).connected()
        program.send_signal(signal.SIGSTOP)
        procs.wait_state(program.pid, "T")
        client.socket.sendall(1000 * transaction(get("k")))
        client.close()
        program.send_signal(signal.SIGCONT)
        other = Client(port).connected()
        other.put("k", b"v")
        other.close()
        program.communicate()
    assert program.returncode == 0


def blocked_signals() -> dict[str, int]:
    """Return the mask of blocked signals of each elasticrs thread, by thread name."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        if (name := fields["Name"].strip()).startswith("elasticrs"):
            found[name] = int(fields["SigBlk"], 16)
    return found


def test_the_threads_of_elasticrs_block_signals():
    supervisor = _core.Supervisor()
    store = _core.WorkerStore()
    store.serve()
    health = _core.HealthServer("127.0.0.1", 0, 60.0)
    try:
        # A new thread sets its own name, so wait until all names are there.
        names = {"elasticrs", "elasticrs-ranks", "elasticrs-healt"}
        blocked = procs.wait_until(blocked_signals, lambda seen: not set(seen) < names)
        for signum in (signal.SIGPIPE, signal.SIGTERM, signal.SIGCHLD):
            assert [name for name, mask in blocked.items() if not mask >> (signum - 1) & 1] == []
    finally:
        health.close()
        store.close()
        supervisor.close()


AGENT = """
import signal, sys
from elasticrs import _core
supervisor = _core.Supervisor()
server = _core.CoordinationServer([("127.0.0.1", 0)], run_id=None, supervisor=supervisor)
client = _core.CoordinationClient("127.0.0.1", server.port, run_id="r", supervisor=supervisor)
client.wait(None)
specs = [_core.ProcessSpec(rank, ["sleep", "inf"], env={"PATH": "/usr/bin:/bin"}) for rank in range(2)]
supervisor.start(_core.GroupSpec(specs, on_failure=_core.StopPolicy(signal.SIGTERM, 60.0)))
while not isinstance(event := supervisor.next_event(), _core.GroupEnded):
    if isinstance(event, _core.GroupStarted):
        print(*event.pids, flush=True)
print("ended", flush=True)
sys.stdin.read()
client.close()
server.close()
supervisor.close()
"""


def test_a_busy_store_does_not_delay_supervision_of_the_workers():
    command = [sys.executable, "-c", AGENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        pids = [int(pid) for pid in agent.stdout.readline().split()]
        # Stop the store's thread, as if it were busy with a search of 100 ms or a reply of 64 MiB, but for
        # longer.
        with held(thread_of(agent.pid, "elasticrs-store")):
            os.kill(pids[0], signal.SIGKILL)
            procs.assert_gone(pids)
            assert agent.stdout.readline() == "ended\n"
        agent.communicate()
    assert agent.returncode == 0


PING = b"\r" + b"ping"


def ask(port: int) -> None:
    """Connect to a workers' store, and exchange one message."""
    with socket.create_connection(("127.0.0.1", port), timeout=procs.HANG) as client:
        client.sendall(b"\x00\xce\xf7\x85\x3c" + PING)
        assert client.recv(4) == PING[1:]


def test_the_store_thread_starts_with_the_first_client_and_keeps_running():
    own = os.getpid()
    supervisor = _core.Supervisor()
    try:
        first, second, unused = _core.WorkerStore(), _core.WorkerStore(), _core.WorkerStore()
        for store in (first, second, unused):
            store.serve(supervisor)
        assert first.waiting() == {}
        assert thread_of(own, "elasticrs-ranks") is None
        unused.close()
        ask(first.port)
        thread = thread_of(own, "elasticrs-ranks")
        assert thread is not None
        first.close()
        ask(second.port)
        second.close()
        assert thread_of(own, "elasticrs-ranks") == thread
        with pytest.raises(ConnectionRefusedError):
            ask(unused.port)
    finally:
        supervisor.close()
    assert thread_of(own, "elasticrs-ranks") is None
