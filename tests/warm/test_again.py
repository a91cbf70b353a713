"""If files of imported modules change while a job runs, the next restart imports the modules again."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from helpers import procs

pytestmark = pytest.mark.beyond_torchrun

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

ENDS = """
import os
VALUE = {value!r}
if os.getppid() == {agent}:
    os.kill(os.getpid(), 9)
"""

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

    def __init__(self, launch, folder, script):
        (folder / "library").mkdir()
        self.module = folder / "library" / "own_library.py"
        self.module.write_text("VALUE = 'old'\n")
        self._started, self._fifo = folder / "started", folder / "fifo"
        os.mkfifo(self._fifo)
        env = {"PYTHONPATH": str(folder / "library")}
        self._events = folder / "events"
        options = ("--max-restarts=5", "--warm=own_library", f"--event-log-handler=file:{self._events}")
        self.launched = launch(*options, script, env=env)

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
        """Make the worker fail."""
        os.kill(self.seen(attempt)[1], signal.SIGUSR2)

    def started(self, attempt):
        """Return ``warm`` or ``cold`` for the start of an attempt, and the phases of that start."""
        line = self.launched.wait_for_line(rf"attempt {attempt} is running, .*, (warm|cold)", "stderr")
        return line[1], procs.wait_until(lambda: self._phases(attempt))

    def _phases(self, attempt):
        for line in self._events.read_text().splitlines():
            about = json.loads(line)["metadata"]
            if about["agent_restarts"] == attempt and "phases_ms" in about["metadata"]:
                return json.loads(about["metadata"])["phases_ms"]
        return None

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
    return Job(launch, tmp_path, worker_script(SHOWS))


def test_a_restart_after_an_edit_imports_again_and_later_ones_do_not(job):
    assert job.seen(0)[0] == "old"
    (first,) = job.nurseries()
    job.edit("newer")
    job.fail(0)
    warm, phases = job.started(1)
    assert (warm, "importing" in phases) == ("warm", True)
    assert job.seen(1)[0] == "newer"
    assert procs.wait_gone(first)
    (second,) = job.nurseries()
    job.fail(1)
    warm, phases = job.started(2)
    assert (warm, "importing" in phases) == ("warm", False)
    assert job.seen(2)[0] == "newer"
    assert job.nurseries() == [second]
    job.succeed(2)
    assert len(re.findall(r"own_library\.py has changed", job.launched.stderr)) == 1


def test_an_edit_during_the_import_reaches_the_next_restart(job):
    job.seen(0)
    job.edit("newer", WAITS)
    job.fail(0)
    job.is_importing()
    job.edit("newest")
    job.go_on()
    assert job.started(1)[0] == "warm"
    assert job.seen(1)[0] == "newer"
    job.fail(1)
    assert job.started(2)[0] == "warm"
    assert job.seen(2)[0] == "newest"
    job.succeed(2)


def test_an_edited_module_that_ends_the_nursery_is_left_out(job):
    job.seen(0)
    job.edit("newer", ENDS)
    job.fail(0)
    assert job.started(1)[0] == "warm"
    assert job.seen(1)[0] == "newer"
    assert re.search("own_library was left out: .*SIGKILL", job.launched.stderr)
    job.succeed(1)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_an_agent_that_ends_during_the_import_leaves_no_processes_or_shared_memory(job, signum):
    job.seen(0)
    job.edit("newer", SHARES)
    # Its name is not that of any memory of tests that run at the same time.
    shared = Path(f"/dev/shm/of_{job.launched.pid}")
    job.fail(0)
    job.is_importing()
    everything = [child.pid for child in job.launched.descendants()]
    assert shared.exists()
    assert {*job.nurseries()} < {*everything}
    job.launched.signal(signum)
    procs.assert_gone(everything, 20)
    job.launched.wait(20)
    procs.reap_adopted()
    assert not shared.exists()
