"""If files of imported modules change while a job runs, a second nursery imports them alongside the first
one.
"""

import os
import re
import signal
from pathlib import Path

import pytest
from helpers import procs
from helpers.launcher import LAUNCHERS, launcher_with

pytestmark = pytest.mark.beyond_torchrun

CHECKS_OFTEN = launcher_with("agent.warming", CHECK_INTERVAL=0.2)

SHOWS = """
    import os, signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
    import own_library
    print("SEEN", os.environ["TORCHELASTIC_RESTART_COUNT"], own_library.VALUE, os.getpid(), flush=True)
    os._exit(0 if signal.sigwait([signal.SIGUSR1, signal.SIGUSR2]) == signal.SIGUSR1 else 3)
"""

WAITS = """
import os
VALUE = {value!r}
if os.getppid() == {agent}:
    open({started!r}, "w").close()
    os.close(os.open({fifo!r}, os.O_RDONLY))
"""
"""A module whose import in a nursery waits until the FIFO is opened for writing."""

SHARES = """
import os
VALUE = {value!r}
if os.getppid() == {agent}:
    from multiprocessing.shared_memory import SharedMemory
    memory = SharedMemory("of_{agent}", create=True, size=1)
    exec({tracker_runs!r})
    open({started!r}, "w").close()
    os.close(os.open({fifo!r}, os.O_RDONLY))
"""
"""Also starts a resource tracker, and makes shared memory that the tracker has to remove."""


class Job:
    """A job with one worker, which prints the value of a user's module."""

    def __init__(self, launch, folder, script, argv):
        (folder / "library").mkdir()
        self.module = folder / "library" / "own_library.py"
        self.module.write_text("VALUE = 'old'\n")
        self._started, self._fifo = folder / "started", folder / "fifo"
        os.mkfifo(self._fifo)
        env = {"PYTHONPATH": str(folder / "library")}
        self.launched = launch("--max-restarts=5", "--warm=own_library", script, env=env, argv=argv)

    def seen(self, attempt):
        """Return the module's value that the worker of an attempt printed, and the worker's pid."""
        line = self.launched.wait_for_line(rf"SEEN {attempt} (\w+) (\d+)", "stdout")
        return line[1], int(line[2])

    def edit(self, value, text="VALUE = {value!r}\n"):
        """Replace the module with one of a different size, because Python may reuse stale bytecode if the
        size is unchanged.
        """
        names = {"agent": self.launched.pid, "started": str(self._started), "fifo": str(self._fifo)}
        names["tracker_runs"] = procs.TRACKER_RUNS
        self.module.write_text(text.format(value=value, **names))

    def fail(self, attempt):
        """Make the worker fail, and return whether the next attempt started warm or cold."""
        os.kill(self.seen(attempt)[1], signal.SIGUSR2)
        line = self.launched.wait_for_line(rf"attempt {attempt + 1} is running, .*\), (warm|cold)", "stderr")
        return line[1]

    def is_imported(self, times=1):
        self.launched.wait_for_lines("warm: imported again", times, "stderr")

    def is_importing(self):
        procs.wait_until(self._started.exists)

    def go_on(self):
        self._fifo.open("w").close()

    def nurseries(self):
        return [child.pid for child in procs.nurseries(self.launched.pid)]

    def succeed(self, attempt):
        os.kill(self.seen(attempt)[1], signal.SIGUSR1)
        self.launched.exits(0)


@pytest.fixture
def job(launch, tmp_path, worker_script):
    """Starts the job."""

    def start(argv=CHECKS_OFTEN):
        return Job(launch, tmp_path, worker_script(SHOWS), argv)

    return start


def test_a_restart_after_the_reimport_is_warm_and_runs_the_new_code(job):
    job = job()
    assert job.seen(0)[0] == "old"
    (first,) = job.nurseries()
    job.edit("newer")
    job.is_imported()
    assert len(job.nurseries()) == 2
    assert job.fail(0) == "warm"
    assert job.seen(1)[0] == "newer"
    assert procs.wait_gone(first)
    assert len(job.nurseries()) == 1
    assert job.fail(1) == "warm"
    assert job.seen(2)[0] == "newer"
    job.succeed(2)
    assert len(re.findall(r"own_library\.py has changed", job.launched.stderr)) == 1


def test_a_restart_before_the_change_check_is_cold_and_runs_the_new_code(job):
    job = job(LAUNCHERS["elasticrs"])
    job.seen(0)
    job.edit("newer")
    assert job.fail(0) == "cold"
    assert job.seen(1)[0] == "newer"
    job.succeed(1)
    assert "own_library.py has changed" in job.launched.stderr


def test_a_restart_during_the_reimport_is_cold_and_runs_the_new_code(job):
    job = job()
    job.seen(0)
    job.edit("newer", WAITS)
    job.is_importing()
    assert job.fail(0) == "cold"
    assert job.seen(1)[0] == "newer"
    job.go_on()
    job.is_imported()
    assert job.fail(1) == "warm"
    assert job.seen(2)[0] == "newer"
    job.succeed(2)


def test_a_change_during_the_reimport_is_detected(job):
    job = job()
    job.seen(0)
    job.edit("newer", WAITS)
    job.is_importing()
    job.edit("newest")
    job.go_on()
    job.is_imported()
    assert job.fail(0) == "cold"
    assert job.seen(1)[0] == "newest"
    job.is_imported(times=2)
    assert job.fail(1) == "warm"
    assert job.seen(2)[0] == "newest"
    job.succeed(2)


def test_workers_start_cold_after_the_second_nursery_is_killed(job):
    job = job()
    job.seen(0)
    (first,) = job.nurseries()
    job.edit("newer")
    job.is_imported()
    (second,) = {*job.nurseries()} - {first}
    os.kill(second, signal.SIGKILL)
    job.launched.wait_for_line("warm: .*cold.*SIGKILL", "stderr")
    for attempt in (0, 1):
        assert job.fail(attempt) == "cold"
        assert job.seen(attempt + 1)[0] == "newer"
    assert job.nurseries() == [first]
    job.succeed(2)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("is_ready", [False, True], ids=["imports", "is ready"])
def test_an_agent_with_two_nurseries_leaves_no_processes_or_shared_memory(job, signum, is_ready):
    job = job()
    pid = job.seen(0)[1]
    # Its name is not that of any memory of tests that run at the same time.
    shared = Path(f"/dev/shm/of_{job.launched.pid}")
    if is_ready:
        job.edit("newer")
        job.is_imported()
    else:
        job.edit("newer", SHARES)
        job.is_importing()
    everything = [child.pid for child in job.launched.descendants()]
    assert (len(job.nurseries()), shared.exists()) == (2, not is_ready)
    assert {pid, *job.nurseries()} < {*everything}
    job.launched.signal(signum)
    procs.assert_gone(everything, 20)
    job.launched.wait(20)
    procs.reap_adopted()
    assert not shared.exists()
