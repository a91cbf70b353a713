"""Workers that keep their state are ordered to copy it before they are stopped."""

import os
import signal
import socket
import sys

from elasticrs import _core

KEEPS = """
import os, socket, sys
agent, test = (chr(0) + name for name in sys.argv[1:])
orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
orders.bind("")
def say(text, to=agent):
    orders.sendto(text.encode(), to)
say(f"keep joined {orders.getsockname()[1:].hex()} 250")
say("joined", test)
while True:
    order = orders.recv(64).decode()
    if order == "keep":
        say("ordered", test)
    elif order == "answer":
        say("keep answered")
    else:
        sys.exit(int(order))
"""
"""Program that keeps its state. It waits for the order of the agent, and does what the test says."""


class Keepers:
    """Workers that keep their state, with a socket through which they report to the test."""

    def __init__(self, group, count, keep_grace):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("")
        self._socket.settimeout(60)
        own = self._socket.getsockname()[1:].decode()
        self.name = group.supervisor.watch_exits()
        command = [sys.executable, "-c", KEEPS, self.name, own]
        idle = ["sleep", "1234"]
        self.pids = group.start(*[command] * count, idle, keep_grace=keep_grace)
        assert self.hear(count) == {"joined"}

    def hear(self, count):
        """Return what ``count`` workers say, and note their addresses."""
        heard = [self._socket.recvfrom(64) for _ in range(count)]
        self.addresses = [address for _, address in heard]
        return {text.decode() for text, _ in heard}

    def tell(self, text):
        for address in self.addresses:
            self._socket.sendto(text.encode(), address)

    def close(self):
        self._socket.close()


def kept_of(group):
    (kept,) = [event for event in group.events if isinstance(event, _core.StateKept)]
    assert kept.begun_ns <= kept.ended_ns
    return sorted(kept.asked), sorted(kept.answered)


def test_workers_are_stopped_after_they_have_copied_their_state(group):
    keepers = Keepers(group, 2, 60.0)
    os.kill(keepers.pids[2], signal.SIGKILL)
    assert keepers.hear(2) == {"ordered"}
    group.until(_core.FailureSeen)
    keepers.tell("answer")
    assert group.end().outcome == "failed"
    assert group.exitcodes() == {0: -signal.SIGTERM, 1: -signal.SIGTERM, 2: -signal.SIGKILL}
    assert kept_of(group) == ([0, 1], [0, 1])
    keepers.close()


def test_a_worker_that_exits_before_its_copy_was_not_stopped_by_the_agent(group):
    keepers = Keepers(group, 1, 60.0)
    os.kill(keepers.pids[1], signal.SIGKILL)
    assert keepers.hear(1) == {"ordered"}
    keepers.tell("7")
    group.end()
    (exited,) = [e for e in group.events if isinstance(e, _core.WorkerExited) and e.local_rank == 0]
    assert (exited.exitcode, exited.sent_signal) == (7, None)
    assert kept_of(group) == ([0], [])
    keepers.close()


def test_a_worker_that_does_not_answer_is_stopped_after_the_limit(group):
    keepers = Keepers(group, 1, 0.01)
    group.supervisor.stop(_core.StopPolicy(signal.SIGTERM, 60.0))
    assert group.end().outcome == "stopped"
    assert kept_of(group) == ([0], [])
    assert group.exitcodes() == {0: -signal.SIGTERM, 1: -signal.SIGTERM}
    keepers.close()


def test_without_a_grace_workers_get_no_order(group):
    keepers = Keepers(group, 1, 0.0)
    group.supervisor.stop(_core.StopPolicy(signal.SIGTERM, 60.0))
    group.end()
    assert not [event for event in group.events if isinstance(event, _core.StateKept)]
    keepers.close()
