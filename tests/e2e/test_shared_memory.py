"""torch's managers unlink the shared memory of the workers, however an attempt ends.

``/dev/shm`` is a file system of its own, so small that a few attempts which leave something would fill it.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import procs

WORKER = Path(__file__).resolve().parent.parent / "workers" / "sharing.py"
PAIR = ("--nproc-per-node=2", "--shutdown-timeout=0.2")
METHODS = ("spawn", "fork", "forkserver")

pytestmark = [pytest.mark.privileged, pytest.mark.beyond_torchrun]


class OwnShm:
    """A private ``/dev/shm`` of 24 MiB that exists until this object is closed."""

    def __init__(self) -> None:
        setup = "mount -t tmpfs -o size=24m tmpfs /dev/shm && echo && exec cat"
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        procs.bystanders.add(self._holder.pid)
        assert self._holder.stdout is not None
        assert self._holder.stdout.read(1) == b"\n", "cannot mount here"

    def prefix(self, folder: Path) -> tuple[str, ...]:
        return ("nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", f"--wd={folder}", "--")

    def names(self) -> list[str]:
        return os.listdir(Path(f"/proc/{self._holder.pid}", "root", "dev", "shm"))

    def close(self) -> None:
        self._holder.communicate()
        procs.bystanders.discard(self._holder.pid)


@pytest.fixture
def shm():
    own = OwnShm()
    yield own
    own.close()


@pytest.fixture
def job(launch, shm, tmp_path):
    def start(word, *options, method="spawn", torch=()):
        how = () if method == "spawn" else ("--run-path", f"--start-method={method}")
        return launch(*PAIR, *options, *how, WORKER, word, *torch, prefix=shm.prefix(tmp_path))

    return start


def assert_nothing_is_left(shm, method="spawn"):
    if method == "forkserver":
        # All functions of the fork server share the program's resource tracker, which exits after the
        # program.
        procs.reap_adopted()
    assert shm.names() == []


@pytest.mark.parametrize(
    ("how", "method"), [("fail", "spawn"), ("die", "spawn"), ("die", "fork"), ("die", "forkserver")]
)
def test_a_failed_attempt_leaves_no_shared_memory(job, shm, how, method):
    launched = job(how, "--max-restarts=1", method=method).exits(1)
    assert launched.stdout.count("HELD 1 ") == 2, launched.stderr
    assert_nothing_is_left(shm, method)


@pytest.mark.parametrize(
    ("how", "grace", "is_insisted", "method"),
    [
        *(("wait", 0.2, False, method) for method in METHODS),
        *(
            pytest.param(*way, method, marks=[] if method == "spawn" else pytest.mark.slow)
            for way in (("ignore", 0.2, False), ("ignore", 60, True))
            for method in METHODS
        ),
    ],
)
def test_a_stopped_job_leaves_no_shared_memory(job, shm, how, grace, is_insisted, method):
    launched = job(how, f"--shutdown-timeout={grace}", method=method)
    launched.wait_for_lines("HELD", 2)
    (launched.insist if is_insisted else launched.signal)(signal.SIGTERM)
    launched.exits(1)
    assert_nothing_is_left(shm, method)


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_agent_leaves_no_shared_memory(job, shm, method):
    launched = job("wait", method=method)
    launched.wait_for_lines("HELD", 2)
    launched.signal(signal.SIGKILL)
    launched.wait()
    procs.reap_adopted()
    assert shm.names() == []


def test_a_killed_nursery_leaves_no_shared_memory(job, shm):
    launched = job("wait")
    launched.wait_for_lines("HELD", 2)
    [nursery] = [each.pid for each in launched.descendants() if each.command.startswith("worker-nursery")]
    os.kill(nursery, signal.SIGKILL)
    launched.exits(1)
    assert_nothing_is_left(shm)


@pytest.mark.torch
def test_shared_memory_of_torch_is_unlinked(job, shm):
    # The nursery imports torch once for both workers and both attempts.
    strategies = ("file_system", "file_descriptor")
    launched = job("die", "--max-restarts=1", "--warm=torch", torch=strategies).exits(1)
    assert launched.stdout.count("HELD 1 ") == 2, launched.stderr
    assert_nothing_is_left(shm)
