"""Processes that seem to have exited, or that cannot be killed."""

import os
import signal
import subprocess
import sys

import pytest
from helpers import procs
from helpers.lines import leftovers

pytestmark = pytest.mark.beyond_torchrun

HEADLESS = f"""
    import os, subprocess, sys, threading
    python = [sys.executable, "-c", {procs.HEADLESS!r}]
    daemon = subprocess.Popen(python, start_new_session=True, stdout=subprocess.PIPE)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    os.write(1, f"ATTEMPT {{attempt}} ".encode() + daemon.stdout.readline())
    if sys.argv[1] == "waits":
        threading.Event().wait()
    os._exit(int(sys.argv[1]))
"""


def headless(launched, attempt=0):
    return int(launched.wait_for_line(rf"ATTEMPT {attempt} HEADLESS (\d+)")[1])


def test_a_process_without_its_main_thread_is_killed_after_success(launch, worker_script):
    launched = launch("--linger=0", worker_script(HEADLESS), "0")
    left = headless(launched)
    launched.exits(0)
    assert leftovers(launched.stderr) == [left]
    procs.assert_gone([left])


def test_a_process_without_its_main_thread_does_not_prevent_a_restart(launch, worker_script):
    launched = launch("--max-restarts=1", worker_script(HEADLESS), "3")
    left = [headless(launched, attempt) for attempt in range(2)]
    launched.exits(1)
    assert leftovers(launched.stderr, "could not kill") == []
    procs.assert_gone(left)


def test_a_process_without_its_main_thread_dies_with_a_killed_launcher(launch, worker_script):
    launched = launch(worker_script(HEADLESS), "waits")
    left = headless(launched)
    launched.signal(signal.SIGKILL)
    launched.wait()
    procs.assert_gone([left])
    procs.reap_adopted()


TRACER = """
import ctypes, signal, sys
PTRACE_SEIZE = 0x4206
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), None, int(sys.argv[2])) == 0, ctypes.get_errno()
print("TRACES", flush=True)
signal.pause()
"""


@pytest.fixture
def trace():
    """Return a function that starts a tracer of a process. The tracer never waits for that process, and is
    killed after the test.
    """
    tracers = []

    def start(pid, options=0):
        command = [sys.executable, "-c", TRACER, str(pid), str(options)]
        tracers.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        procs.bystanders.add(tracers[-1].pid)
        assert tracers[-1].stdout.readline() == b"TRACES\n"
        return tracers[-1].pid

    yield start
    for tracer in tracers:
        with tracer:
            tracer.kill()
        procs.bystanders.discard(tracer.pid)
    # The traced processes become children of this process only when their tracers are gone.
    procs.reap_adopted()


TRACED = """
    import os, sys
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    os.write(1, b"ATTEMPT %d PID %d\\n" % (attempt, os.getpid()))
    if attempt == 0:
        open(sys.argv[1]).read()
    os._exit(0 if attempt else int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_whose_exit_is_held_by_a_tracer_counts_as_exited(launch, worker_script, trace, tmp_path, code):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    launched = launch("--max-restarts=1", worker_script(TRACED), fifo, str(code))
    pid = int(launched.wait_for_line(r"ATTEMPT 0 PID (\d+)")[1])
    tracer = trace(pid)
    os.close(os.open(fifo, os.O_WRONLY))
    launched.exits(0)
    assert f"(pid {pid}) has exited" in launched.stderr
    assert f"(pid {tracer}) traces it" in launched.stderr
    assert "hung" not in launched.stderr
    assert ("ATTEMPT 1" in launched.stdout) == (code != 0)
