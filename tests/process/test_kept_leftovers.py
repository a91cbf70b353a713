"""Leftover processes may keep running after success for as long as the user allows, with any start method."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from helpers import procs
from helpers.lines import leftovers
from helpers.procs import run_program

METHODS = pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])

LEAVE = """
    import os, signal, subprocess
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    # `vfork` returns a moment before the new program has its name.
    while not open(f"/proc/{child.pid}/cmdline").read():
        signal.sigtimedwait([], 0.001)
    os.write(1, b"LEFT %d %d\\n" % (os.getpid(), child.pid))
"""


@pytest.fixture
def leave(launch, worker_script, method):
    def start(*options):
        how = () if method == "program" else ("--run-path", f"--start-method={method}")
        launched = launch(*how, *options, worker_script(LEAVE))
        line = launched.wait_for_line(r"LEFT (\d+) (\d+)")
        return launched, *(int(pid) for pid in line.groups())

    return start


@METHODS
@pytest.mark.parametrize("linger", ["0", "0.1"])
def test_a_leftover_process_is_killed_and_named_after_the_linger_time(leave, linger):
    launched, _, left = leave(f"--linger={linger}")
    launched.exits(0)
    assert f": {left} (sleep)\n" in launched.stderr
    procs.assert_gone([left])


@pytest.mark.parametrize("method", ["program", "spawn", "fork", "forkserver"])
def test_keep_descendants_lets_a_leftover_process_keep_running(leave):
    launched, _, left = leave("--keep-descendants")
    launched.exits(0)
    assert "sleep 300" not in launched.stderr
    # Multiprocessing's helper processes exit after their program.
    procs.reap_adopted(keep=[left])
    (child,) = procs.adopted()
    assert (child.pid, child.state) == (left, "S")
    procs.kill_and_reap(child)


FORKS = """
    import os, signal
    if (child := os.fork()) == 0:
        os.setsid()
        signal.pause()
    os.write(1, b"LEFT %d\\n" % child)
"""


@METHODS
def test_the_launcher_does_not_wait_for_a_kept_process_with_open_descriptors(launch, worker_script, method):
    options = ("--run-path", f"--start-method={method}", "--keep-descendants", "--redirects=2")
    launched = launch(*options, worker_script(FORKS), stdin=subprocess.DEVNULL)
    left = int(launched.wait_for_line(r"LEFT (\d+)")[1])
    try:
        assert procs.wait_gone(launched.pid)
        assert os.path.exists(f"/proc/{left}")
    finally:
        procs.kill_adopted(keep=[launched.pid])
    launched.exits(0)


@METHODS
def test_a_signal_kills_a_lingering_process(leave):
    launched, worker, left = leave("--linger=1000")
    procs.assert_gone([worker])
    assert os.path.exists(f"/proc/{left}")
    launched.signal(signal.SIGTERM)
    launched.exits(1)
    assert "SIGTERM received" in launched.stderr
    procs.assert_gone([left])


@METHODS
def test_killing_the_launcher_kills_a_lingering_process(leave):
    launched, worker, left = leave("--linger=1000")
    procs.assert_gone([worker])
    launched.signal(signal.SIGKILL)
    launched.exits(-signal.SIGKILL)
    procs.assert_gone([left])
    procs.reap_adopted()


UNENDABLE = """
    import subprocess
    from elasticrs._engine.workers.functions import keeper

    keeper._GIVE_UP = keeper._LAST_MOMENT = 0.05
    # As in state D.
    keeper._kill = lambda *_: None
    child = subprocess.Popen(["sleep", "1000"])
    keeper._end_all()
    child.kill()
    child.wait()
    print(child.pid)
"""


def test_a_keeper_names_the_processes_that_it_cannot_kill():
    program = [sys.executable, "-c", textwrap.dedent(UNENDABLE)]
    done = run_program(program, check=True)
    assert leftovers(done.stderr, "could not kill") == [int(done.stdout)]
