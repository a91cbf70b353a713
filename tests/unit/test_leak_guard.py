"""Tests for the leak guard that all other tests rely on. It must find leaked processes, descriptors and
threads.
"""

import os
import re
from pathlib import Path

import pytest
from helpers import leaks, procs

HELPERS = Path(__file__).resolve().parent.parent

TESTS = """
import os, subprocess, threading
from helpers import procs

stop = threading.Event()

def test_clean():
    subprocess.run(["true"], check=True)
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    os.close(os.open("/dev/null", os.O_RDONLY))

def test_a_running_child():
    os.posix_spawn("/bin/sleep", ["sleep", "1234"], {})

def test_the_child_is_gone():
    assert procs.children() == []

def test_an_unreaped_child():
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

def test_an_orphaned_daemon():
    subprocess.run(["sh", "-c", "setsid sleep 1234 >/dev/null 2>&1 & exit 0"], check=True)
    # At first it still has the command line of the shell that forked it.
    procs.wait_until(lambda: "sleep 1234" in [child.command for child in procs.children()])

def test_an_open_descriptor():
    os.open("/dev/null", os.O_RDONLY)

def test_a_running_thread():
    threading.Thread(target=stop.wait).start()

def teardown_module():
    stop.set()
"""

LEAKS = {
    "test_a_running_child": r"process \d+ \(\w\) sleep 1234",
    "test_an_unreaped_child": r"process \d+ \(Z\) \[true\]",
    "test_an_orphaned_daemon": r"process \d+ \(\w\) sleep 1234",
    "test_an_open_descriptor": r"descriptor -> /dev/null",
    "test_a_running_thread": r"thread ",
}


def test_each_leak_fails_the_test_that_caused_it_and_is_named(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HELPERS))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest("from helpers.leaks import no_leaks\n")
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=7, errors=len(LEAKS))
    told = re.split(r"_+ ERROR at teardown of (\w+) _+", result.stdout.str())[1:]
    found = dict(zip(told[::2], told[1::2], strict=True))
    assert found.keys() == LEAKS.keys()
    assert [name for name, leak in LEAKS.items() if not re.search(leak, found[name])] == []


def test_a_child_that_survives_sigkill_does_not_keep_the_others_alive(monkeypatch):
    before = leaks.snapshot()
    pids = [os.posix_spawn("/bin/sleep", ["sleep", "1234"], {}) for _ in range(2)]
    kill_and_reap, (stuck, other) = procs.kill_and_reap, pids

    def survives(child, *timeout):
        # Pretend that SIGKILL has no effect. Only uninterruptible sleep does that, and no test can cause it.
        if child.pid == stuck:
            raise TimeoutError
        kill_and_reap(child, *timeout)

    monkeypatch.setattr(procs, "kill_and_reap", survives)
    told = leaks.end_children(before)
    assert sorted("does not end" in line for line in told) == [False, True]
    left = {child.pid for child in procs.children()}
    assert (stuck in left, other in left) == (True, False)
    monkeypatch.undo()
    kill_and_reap(procs.process(stuck))
    assert set(pids).isdisjoint(child.pid for child in procs.children())


@pytest.mark.parametrize("is_gone", [False, True])
def test_orphans_that_their_owner_reaps_first_are_no_error(monkeypatch, is_gone):
    (pid, parent) = os.posix_spawn("/bin/true", ["true"], {}), os.getpid()
    child = procs.process(pid)
    assert child is not None
    assert child.ppid == parent
    looks = [[child], []]
    monkeypatch.setattr(procs, "adopted", lambda _keep: looks.pop(0))
    wait_readable = procs.wait_readable

    def reaped_meanwhile(pidfd, timeout):
        found = wait_readable(pidfd, timeout)
        os.waitpid(pid, 0)
        return found

    if is_gone:
        os.waitpid(pid, 0)
    else:
        monkeypatch.setattr(procs, "wait_readable", reaped_meanwhile)
    procs.reap_adopted()
    assert looks == []
