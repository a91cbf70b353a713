"""Processes that look as if they had ended, or that nobody can end."""

import signal

import pytest
from helpers import procs

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


def test_a_process_without_its_main_thread_is_ended_after_success(launch, worker_script):
    launched = launch("--linger=0", worker_script(HEADLESS), "0")
    left = headless(launched)
    assert launched.wait() == 0
    assert f"ended what the workers left behind: {left} (" in launched.stderr
    procs.assert_gone([left])


def test_a_process_without_its_main_thread_holds_up_no_restart(launch, worker_script):
    launched = launch("--max-restarts=1", worker_script(HEADLESS), "3")
    left = [headless(launched, attempt) for attempt in range(2)]
    assert launched.wait() == 1
    assert "could not end" not in launched.stderr
    procs.assert_gone(left)


def test_a_process_without_its_main_thread_ends_with_a_killed_launcher(launch, worker_script):
    launched = launch(worker_script(HEADLESS), "waits")
    left = headless(launched)
    launched.signal(signal.SIGKILL)
    launched.wait()
    procs.assert_gone([left])
    procs.reap_adopted()
