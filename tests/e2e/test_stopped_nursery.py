"""A nursery (the parent process of workers) that is paused by SIGSTOP still kills its workers when its agent
is killed.
"""

import os
import signal

import pytest
from helpers import procs

pytestmark = pytest.mark.beyond_torchrun


@pytest.mark.parametrize("options", [(), ("--warm=json",)], ids=["cold", "warm"])
def test_workers_die_with_a_killed_agent_whose_nurseries_are_paused(launch, worker_script, options):
    script = worker_script("import os, signal\nos.write(1, b'HERE\\n')\nsignal.pause()")
    launched = launch("--nproc-per-node=2", *options, script)
    launched.wait_for_lines("HERE", 2)
    below = [process.pid for process in launched.descendants()]
    nurseries = [process.pid for process in procs.children(launched.pid)]
    assert len(nurseries) == (2 if options else 1)
    for pid in nurseries:
        os.kill(pid, signal.SIGSTOP)
        procs.wait_state(pid, "T")
    launched.signal(signal.SIGKILL)
    launched.exits(-signal.SIGKILL)
    procs.assert_gone(below)
    procs.reap_adopted()
