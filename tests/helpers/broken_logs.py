"""Jobs whose log file system breaks while they run. They have private mounts, and workers report through a
FIFO outside them.

The launcher runs in a mount namespace of its own, which vanishes with its last process, whatever becomes of
the test. From outside it is reached through ``/proc``.
"""

import errno
import fcntl
import os
import re
import resource
import select
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from helpers.launcher import Launched
from helpers.procs import HANG, run_program
from helpers.steady import SteadyJob

OWN_SIZE = 16 << 20
"""No file system of these tests is as large, in bytes."""

FS_IOC_SHUTDOWN = 0x8004587D
"""From now on, everything on the file system is EIO; what was accepted before is written out first."""


def namespace(setup: str, folder: Path) -> tuple[str, ...]:
    """Return a command prefix with private mounts, which a shell line sets up. In that line, ``$0`` is the
    folder.
    """
    return ("unshare", "--mount", "--", "sh", "-c", f'{setup} && exec "$@"', str(folder))


def why_not(prefix: Sequence[str]) -> str | None:
    """Return why this machine cannot run a command with this prefix, or ``None`` if it can."""
    tried = run_program([*prefix, "true"])
    return None if tried.returncode == 0 else f"cannot mount here: {tried.stderr.strip()}"


class BrokenLogsJob(SteadyJob):
    """A job whose workers say what they have to say past their logs.

    Args:
        how: see :class:`SteadyJob`; the prefix before the launcher's command line.
    """

    def __init__(self, launch: Callable[..., Launched], folder: Path, n: int, *args: str, **how: Any) -> None:
        (folder / "logs").mkdir(exist_ok=True)
        os.mkfifo(folder / "events")
        self._events = os.open(folder / "events", os.O_RDWR | os.O_NONBLOCK)
        self._told = ""
        self._inside: int | None = None
        super().__init__(launch, folder, n, *args, env={"EVENTS": str(folder / "events")}, **how)

    def close(self) -> None:
        os.close(self._events)
        self.let_go()

    # --- reports of the workers ------------------------------------------------------------------------

    def wait_for(self, pattern: str, count: int = 1) -> list[re.Match[str]] | None:
        """Wait for ``count`` matching lines from workers. Return ``None`` if the launcher exits first.

        Raises:
            AssertionError: neither comes.
        """
        deadline = time.monotonic() + HANG
        poll = select.poll()
        poll.register(self._events, select.POLLIN)
        poll.register(self.launched.pidfd, select.POLLIN)
        while True:
            found = list(re.finditer(rf"^{pattern}\n", self._told, re.MULTILINE))
            if len(found) >= count:
                return found[:count]
            ready = {fd for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}
            if self._events in ready:
                self._told += os.read(self._events, 1 << 16).decode()
            elif self.launched.pidfd in ready:
                return None
            assert ready, f"{len(found)} of {count} lines match {pattern!r}:\n{self._told}"

    def ready(self, attempt: int = 0, count: int | None = None) -> dict[int, int]:
        """Wait until ``count`` workers of an attempt are running (by default, all), and return their pids by
        rank.

        It may be that there are none: when the attempt cannot be started.
        """
        found = self.wait_for(rf"READY (\d+) {attempt} (\d+)", self.n if count is None else count)
        return {int(line[1]): int(line[2]) for line in found or ()}

    # --- faults ----------------------------------------------------------------------------------------

    def inside(self) -> Path:
        """Return the log folder as the launcher sees it. The path stays valid after the launcher has exited,
        until :meth:`let_go`.

        To be called when a worker runs: before, the launcher's mounts may not be there yet.
        """
        if self._inside is None:
            self._inside = os.open(f"/proc/{self.launched.pid}/root{self.logs}", os.O_RDONLY)
        return Path(f"/proc/self/fd/{self._inside}")

    def let_go(self) -> None:
        """Close the log folder, so that its file system can be unmounted."""
        if self._inside is not None:
            os.close(self._inside)
            self._inside = None

    def fill(self) -> None:
        """Use up the free space of the file system."""
        self._assert_own_file_system()
        filler = os.open(self.inside() / "filler", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            # Never write more than this, whatever file system is mounted.
            for _ in range(OWN_SIZE >> 12):
                os.write(filler, bytes(1 << 12))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        else:
            raise AssertionError("it is not full")
        finally:
            os.close(filler)

    def take_inodes(self) -> None:
        """Use up all inodes, so that no file or directory can be created."""
        self._assert_own_file_system()
        for number in range(os.statvfs(self.inside()).f_ffree):
            (self.inside() / f"inode-{number}").touch()

    def shut_down(self) -> None:
        """Make every operation on the file system of the logs fail with an input/output error."""
        self._assert_own_file_system()
        assert self._inside is not None
        fcntl.ioctl(self._inside, FS_IOC_SHUTDOWN, struct.pack("I", 0))
        self.let_go()

    def make_read_only(self) -> None:
        """Make the logs read-only. Nothing can be created or opened for writing, but files that are open stay
        writable.
        """
        theirs = f"/proc/{self.launched.pid}/ns/mnt"
        assert os.readlink(theirs) != os.readlink("/proc/self/ns/mnt"), "these mounts are everybody's"
        enter = ("nsenter", f"--mount={theirs}", "--", "sh", "-c")
        # Prepare the read-only mount elsewhere and bind it over the logs in one step, because a mount with
        # files open for writing cannot be made read-only.
        bind = 'mount --bind "$0" "$1" && mount -o remount,bind,ro "$1" && mount --bind "$1" "$0"'
        elsewhere = self.logs.with_name("read-only")
        elsewhere.mkdir()
        subprocess.run([*enter, bind, str(self.logs), str(elsewhere)], check=True)

    def _assert_own_file_system(self) -> None:
        """Assert that the file system, which is about to be damaged, belongs to this test alone."""
        inside = self.inside()
        assert inside.stat().st_dev != self.logs.stat().st_dev, "nothing is mounted there"
        size = os.statvfs(inside)
        assert size.f_blocks * size.f_frsize <= OWN_SIZE, "this is no file system of ours"

    # --- checks ----------------------------------------------------------------------------------------

    def troubles(self, error: str) -> list[tuple[int, str]]:
        """Return the rank and the log file from each line in which the launcher reports this error."""
        pattern = rf"rank (\d+): log file \S*/(attempt_\d+/\d+/std\w+\.log): {error}$"
        found = re.findall(pattern, self.launched.stderr, re.MULTILINE)
        return [(int(rank), file) for rank, file in found]


def take_descriptors(pid: int) -> None:
    """Limit the process's open files so that it cannot open another one."""
    used = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
    free = next(number for number in range(len(used) + 1) if number not in used)
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))
