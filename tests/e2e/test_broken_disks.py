"""The launcher survives disks that are full, broken or read-only, and a shortage of file descriptors.

Whatever the kernel accepted is in the files, and each trouble is told once, by rank and file. Processes and
descriptors are seen to by the guard around every test.
"""

import errno
import os
import shutil
import signal
import subprocess

import pytest
from helpers import procs
from helpers.broken_logs import BrokenLogsJob, namespace, take_descriptors, why_not
from helpers.procs import HANG
from helpers.steady import EXIT_0, EXIT_1, send

pytestmark = [pytest.mark.beyond_torchrun, pytest.mark.slow]

N = 4
PHASES = ("starting", "running", "stopping", "restarting")


@pytest.fixture
def mounts(tmp_path):
    """Return a function that makes a command prefix from a shell line, in which ``$0`` is the log folder."""
    (tmp_path / "logs").mkdir(exist_ok=True)

    def make(setup):
        prefix = namespace(setup, tmp_path / "logs")
        if (reason := why_not(prefix)) is not None:
            pytest.skip(reason)
        return prefix

    return make


@pytest.fixture
def broken_job(launch, tmp_path):
    """Return a function that starts the job; see :class:`BrokenLogsJob`."""
    made = []

    def make(*args, **how):
        made.append(BrokenLogsJob(launch, tmp_path, N, *args, **how))
        return made[-1]

    yield make
    for job in made:
        job.close()


class Phase:
    """A job that has been brought to a certain phase. After the test has injected a fault, :meth:`end` lets
    it finish.
    """

    def __init__(self, name, make, restarts=0, **how):
        self.name = name
        budget = 1 if name == "restarting" else restarts
        arguments = ("--max-restarts", str(budget), "--shutdown-timeout", "1")
        self.job = make(*arguments, stubborn=name == "stopping", **how)
        self.attempt = 1 if name == "restarting" else 0
        if name == "starting":
            self.job.ready(count=1)
        else:
            pids = self.job.ready()
        # Open the log folder while the launcher is running, because its mounts are unreachable after it has
        # exited.
        self.job.inside()
        if name in {"stopping", "restarting"}:
            send(pids[0], EXIT_1)
        if name == "stopping":
            self.job.wait_for("STOPPING .*", N - 1)
        if name == "restarting":
            # Only one worker is known to run; the others are still starting.
            self.job.ready(attempt=1, count=1)

    def end(self, refused=None):
        """Let the job finish, and return the launcher's exit code.

        Args:
            refused: what the writes of all workers must have met by then.
        """
        pids = {} if self.name == "stopping" else self.job.ready(self.attempt)
        if refused is not None and (pids or self.name == "stopping"):
            ranks = N - 1 if self.name == "stopping" else N
            assert self.job.wait_for(rf"REFUSED {refused} .* {self.attempt} .*", ranks)
        assert self.name == "stopping" or not pids or not self.job.launched.has_exited
        for pid in pids.values():
            send(pid, EXIT_0)
        return self.job.launched.wait()

    @property
    def stdouts(self):
        """Rank and stdout file of every worker."""
        return {(rank, f"attempt_{self.attempt}/{rank}/stdout.log") for rank in range(N)}


def assert_no_traceback(job):
    assert "Traceback" not in job.launched.stderr
    assert "panicked" not in job.launched.stderr


def assert_could_not_restart(phase, error):
    """Make rank 0 fail, and assert that the next attempt cannot start."""
    send(phase.job.ready()[0], EXIT_1)
    phase.job.launched.exits(1)
    line, last = [line for line in phase.job.launched.stderr.splitlines() if "could not be started" in line]
    assert "failed after" in last
    assert error in line
    assert "attempt_1" in line
    assert_no_traceback(phase.job)


def end_with(phase, error, refused=None):
    """Let the job finish. Return false if the error occurred before the last worker had started."""
    code = phase.end(refused)
    stderr = phase.job.launched.stderr
    assert_no_traceback(phase.job)
    if error in stderr:
        assert phase.name in {"starting", "restarting"}, stderr
        assert code == 1
        return False
    assert code == (1 if phase.name == "stopping" else 0), stderr
    return True


def assert_told_once(phase, error):
    told = phase.job.troubles(error)
    assert len(told) == len(set(told)), told
    assert phase.stdouts <= set(told), phase.job.launched.stderr


# --- no space ------------------------------------------------------------------------------------------


@pytest.mark.privileged
@pytest.mark.parametrize("name", PHASES)
def test_a_full_disk_does_not_fail_the_job_and_is_reported_once(name, broken_job, mounts):
    prefix = mounts('mount -t tmpfs -o size=64k none "$0"')
    phase = Phase(name, broken_job, prefix=prefix)
    phase.job.fill()
    assert phase.end(errno.ENOSPC) == (1 if name == "stopping" else 0), phase.job.launched.stderr
    assert_told_once(phase, os.strerror(errno.ENOSPC))
    assert_no_traceback(phase.job)
    phase.job.check_files(phase.job.inside())


@pytest.mark.privileged
def test_a_full_disk_is_reported_while_the_job_runs(broken_job, mounts):
    prefix = mounts('mount -t tmpfs -o size=64k none "$0"')
    phase = Phase("running", broken_job, prefix=prefix)
    phase.job.fill()
    # The launcher checks the file system every five seconds.
    phase.job.launched.wait_for_line(rf"rank 0: log file .*: {os.strerror(errno.ENOSPC)}")
    assert phase.end() == 0


@pytest.mark.privileged
@pytest.mark.parametrize(
    ("setup", "harm", "error"),
    [
        # On a tmpfs, a directory needs no space but an inode.
        ('mount -t tmpfs -o size=64k,nr_inodes=20 none "$0"', BrokenLogsJob.take_inodes, errno.ENOSPC),
        ("true", BrokenLogsJob.make_read_only, errno.EROFS),
    ],
    ids=["full", "read-only"],
)
def test_a_restart_fails_the_job_if_its_log_folder_cannot_be_made(broken_job, mounts, setup, harm, error):
    phase = Phase("running", broken_job, restarts=3, prefix=mounts(setup))
    harm(phase.job)
    assert_could_not_restart(phase, os.strerror(error))
    phase.job.check_files(phase.job.inside())


# --- input/output errors -------------------------------------------------------------------------------


@pytest.fixture
def image(mounts, tmp_path):
    """Return a command prefix that mounts an ext4 image on the log folder."""
    path = tmp_path / "image"
    if shutil.which("mke2fs", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
        pytest.skip("no mke2fs")
    make = ["mke2fs", "-q", "-F", "-t", "ext4", path, "8M"]
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    subprocess.run(make, check=True, capture_output=True, env=environment)
    return mounts(f'mount -o loop "{path}" "$0"')


@pytest.mark.privileged
@pytest.mark.parametrize("name", PHASES)
def test_a_broken_disk_does_not_fail_running_workers_and_is_reported_once(name, broken_job, image, tmp_path):
    phase = Phase(name, broken_job, prefix=image)
    phase.job.shut_down()
    if end_with(phase, "could not open", errno.EIO):
        assert_told_once(phase, "Input/output error")
    # The launcher's mounts are gone. Mount the image again, to see the files that a machine would find after
    # a repair.
    out = tmp_path / "out"
    subprocess.run([*image, "cp", "-r", tmp_path / "logs", out], check=True)
    phase.job.check_files(out)


# --- unwritable directories ----------------------------------------------------------------------------


@pytest.mark.privileged
@pytest.mark.parametrize("name", PHASES)
def test_running_workers_continue_if_the_log_directory_becomes_read_only(name, broken_job, mounts):
    phase = Phase(name, broken_job, prefix=mounts("true"))
    phase.job.make_read_only()
    # Log files that are already open remain writable.
    end_with(phase, "Read-only file system")
    phase.job.check_files(phase.job.logs)


@pytest.mark.privileged
def test_a_read_only_log_directory_at_the_start_is_a_usage_error(launch, worker_script, mounts, tmp_path):
    prefix = mounts('mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"')
    arguments = ("--log-dir", tmp_path / "logs", "--tee", "3")
    launched = launch(*arguments, worker_script("print('STARTED')"), prefix=prefix).exits(2)
    assert "STARTED" not in launched.stdout
    (line,) = launched.stderr.splitlines()
    assert "Read-only file system" in line
    assert str(tmp_path / "logs") in line


def test_removing_the_logs_of_a_running_job_does_not_fail_it(broken_job):
    phase = Phase("running", broken_job)
    shutil.rmtree(phase.job.logs)
    assert phase.end() == 0, phase.job.launched.stderr
    assert_no_traceback(phase.job)


@pytest.mark.parametrize("lacks", ["logs", "descriptors"])
def test_a_failure_is_reported_without_logs_or_free_descriptors(broken_job, lacks):
    phase = Phase("running", broken_job)
    if lacks == "logs":
        shutil.rmtree(phase.job.logs)
    else:
        take_descriptors(phase.job.launched.pid)
    send(phase.job.ready()[2], signal.SIGSEGV)
    assert phase.job.launched.wait() == 1
    assert "Root Cause" in phase.job.launched.stderr
    assert "SIGSEGV" in phase.job.launched.stderr
    assert_no_traceback(phase.job)


def test_a_restart_succeeds_after_the_logs_were_removed(broken_job):
    phase = Phase("running", broken_job, restarts=3)
    shutil.rmtree(phase.job.logs)
    send(phase.job.ready()[0], EXIT_1)
    for pid in phase.job.ready(attempt=1).values():
        send(pid, EXIT_0)
    assert phase.job.launched.wait() == 0, phase.job.launched.stderr
    assert_no_traceback(phase.job)


# --- descriptors ---------------------------------------------------------------------------------------


def nursery_of(launched):
    (nursery,) = procs.children(launched.pid)
    return nursery.pid


@pytest.mark.parametrize("name", PHASES)
@pytest.mark.parametrize("whose", ["agent", "nursery"])
def test_running_workers_continue_if_agent_or_nursery_has_no_free_descriptor(name, whose, broken_job):
    phase = Phase(name, broken_job)
    launched = phase.job.launched
    take_descriptors(launched.pid if whose == "agent" else nursery_of(launched))
    end_with(phase, "Too many open files")
    phase.job.check_files(phase.job.logs)


def test_a_restart_needs_no_more_descriptors_than_the_start(broken_job):
    phase = Phase("running", broken_job, restarts=1)
    take_descriptors(phase.job.launched.pid)
    send(phase.job.ready()[0], EXIT_1)
    phase.attempt = 1
    assert phase.end() == 0, phase.job.launched.stderr
    phase.job.check_files(phase.job.logs)


def test_a_restart_fails_if_the_nursery_has_no_free_descriptor(broken_job):
    phase = Phase("running", broken_job, restarts=1)
    take_descriptors(nursery_of(phase.job.launched))
    send(phase.job.ready()[0], EXIT_1)
    assert phase.job.launched.wait() == 1
    assert "Too many open files" in phase.job.launched.stderr
    assert_no_traceback(phase.job)
    phase.job.check_files(phase.job.logs)


def test_a_nursery_without_descriptors_kills_leftover_processes(launch, worker_script):
    script = worker_script("""
        import os, signal, subprocess
        signal.signal(signal.SIGUSR2, lambda *_: os._exit(1))
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print("READY", os.getpid(), flush=True)
        while True:
            signal.sigtimedwait([], 0.05)
    """)
    launched = launch(script)
    pid = int(launched.wait_for_line(r"READY (\d+)")[1])
    take_descriptors(nursery_of(launched))
    send(pid, EXIT_1)
    # The launcher exits long before the nursery would give up on the leftover process.
    assert launched.wait(timeout=HANG / 2) == 1
