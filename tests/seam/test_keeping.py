"""Workers that keep their state are ordered to copy it before they are stopped."""

import os
import signal
import socket
import sys
from contextlib import closing

from elasticrs import _core

KEEPS = """
import os, socket, sys
agent, test = (chr(0) + name for name in sys.argv[1:])
orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
orders.bind("")
def say(text, to):
    orders.sendto(text.encode(), to)
say(f"keep joined {orders.getsockname()[1:].hex()} 250", agent)
say("joined", test)
assert orders.recv(64) == b"keep"
say("ordered", test)
orders.recv(64) == b"answer" or sys.exit(7)
say("keep answered", agent)
orders.recv(64)
"""
"""Program that keeps its state. Once ordered to copy it, the program answers or exits, as the test says."""


def test_workers_are_stopped_when_they_have_copied_their_state_or_have_exited(group):
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as heard:
        heard.bind("")
        heard.settimeout(60)
        names = group.supervisor.watch_exits(), heard.getsockname()[1:].decode()
        keeps, idle = [sys.executable, "-c", KEEPS, *names], ["sleep", "1234"]
        pids = group.start(keeps, keeps, idle, keep_grace=60.0)
        assert {heard.recv(64) for _ in range(2)} == {b"joined"}
        os.kill(pids[2], signal.SIGKILL)
        (first, one), (second, other) = (heard.recvfrom(64) for _ in range(2))
        assert (first, second) == (b"ordered", b"ordered")
        group.until(_core.FailureSeen)
        heard.sendto(b"answer", one)
        heard.sendto(b"exit", other)
        assert group.end().outcome == "failed"
    exits = [event for event in group.events if isinstance(event, _core.WorkerExited)]
    found = {each.local_rank: (each.exitcode, each.sent_signal) for each in exits}
    assert found.pop(2) == (-signal.SIGKILL, None)
    assert sorted(found.values()) == [(-signal.SIGTERM, signal.SIGTERM), (7, None)]
    (kept,) = [event for event in group.events if isinstance(event, _core.StateKept)]
    assert kept.begun_ns <= kept.ended_ns
    answered = [rank for rank, end in found.items() if end[0] != 7]
    assert (sorted(kept.asked), kept.answered) == ([0, 1], answered)
