"""Ctrl-C in a terminal with two foreground agents signals both agents at once, and no worker directly."""

import os
import select
import subprocess
import sys
import time

import pytest
from helpers.launcher import clean_environment
from helpers.nodes import RANKS, meeting
from helpers.procs import HANG
from helpers.said import line_with

pytestmark = [pytest.mark.timeout(120), pytest.mark.beyond_torchrun]

LEADER = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, lambda *_: None)
agents = [subprocess.Popen([sys.executable, "-m", "elasticrs.launch", *sys.argv[1:]]) for _ in range(2)]
print("CODES", *(agent.wait() for agent in agents), flush=True)
"""


class Terminal:
    """The user's end of a pseudoterminal."""

    def __init__(self, fd):
        self.fd, self.shown = fd, ""

    def until(self, text, count=1):
        deadline = time.monotonic() + HANG
        while self.shown.count(text) < count:
            ready, _, _ = select.select([self.fd], [], [], deadline - time.monotonic())
            assert ready, self.shown
            self.shown += os.read(self.fd, 65536).decode(errors="replace")

    def press(self, keys):
        os.write(self.fd, keys)


@pytest.fixture
def foreground():
    """Run two agents of one job in the foreground of a terminal."""
    ours, theirs = os.openpty()
    options = (*meeting(), "--nproc-per-node=2", str(RANKS))
    command = ["setsid", "--ctty", sys.executable, "-c", LEADER, *options]
    environment = {**clean_environment(), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as leader:
        os.close(theirs)
        yield Terminal(ours)
        leader.wait(HANG)
    os.close(ours)


def test_ctrl_c_ends_a_job_of_two_foreground_agents(foreground):
    foreground.until("READY ", 4)
    foreground.press(b"\x03")
    foreground.until("CODES 1 1")
    # An agent may learn from the other one that the job is ending before it handles its own signal, so one
    # report is enough.
    assert foreground.shown.count("SIGINT received: ") in (1, 2), foreground.shown
    line_with(foreground.shown, "job ends", "its store")
