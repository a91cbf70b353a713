"""The guard that all other tests rely on sees what it is there to see."""

from pathlib import Path

import pytest

HELPERS = Path(__file__).resolve().parent.parent

CONFTEST = "from helpers.leaks import no_leaks\n"


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Runs a test under the guard, in a process of its own."""
    monkeypatch.setenv("PYTHONPATH", str(HELPERS))

    def run(source: str) -> pytest.RunResult:
        pytester.makeconftest(CONFTEST)
        pytester.makepyfile(source)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider")

    return run


def test_a_clean_test_passes(run):
    result = run(
        """
        import os, subprocess, threading
        def test_clean():
            subprocess.run(["true"], check=True)
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()
            os.close(os.open("/dev/null", os.O_RDONLY))
        """
    )
    result.assert_outcomes(passed=1)


def test_a_running_child_is_named_and_killed(run):
    result = run(
        """
        import os
        def test_leaky():
            pid = os.posix_spawn("/bin/sleep", ["sleep", "1234"], {})
        def test_gone():
            assert not any(os.path.exists(f"/proc/{os.getpid()}/task/{t}/children")
                           and open(f"/proc/{os.getpid()}/task/{t}/children").read().strip()
                           for t in os.listdir("/proc/self/task"))
        """
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.re_match_lines([r".*process \d+ \(\w\) sleep 1234"])


def test_an_unreaped_child_is_a_leak(run):
    result = run(
        """
        import os
        def test_leaky():
            pid = os.posix_spawn("/bin/true", ["true"], {})
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        """
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.re_match_lines([r".*process \d+ \(Z\) \[true\]"])


def test_an_orphaned_daemon_is_found(run):
    result = run(
        """
        import os, subprocess
        from helpers import procs
        def test_leaky():
            subprocess.run(["sh", "-c", "setsid sleep 1234 >/dev/null 2>&1 & exit 0"], check=True)
            # At first it still has the command line of the shell that forked it.
            while "sleep 1234" not in [child.command for child in procs.children()]:
                os.sched_yield()
        """
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.re_match_lines([r".*process \d+ \(\w\) sleep 1234"])


def test_an_open_descriptor_is_a_leak(run):
    result = run(
        """
        import os
        def test_leaky():
            os.open("/dev/null", os.O_RDONLY)
        """
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*descriptor -> /dev/null*"])


def test_a_running_thread_is_a_leak(run):
    result = run(
        """
        import threading
        stop = threading.Event()
        def test_leaky():
            threading.Thread(target=stop.wait).start()
        def teardown_module():
            stop.set()
        """
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*thread *"])
