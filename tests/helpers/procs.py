"""Functions to find processes, wait for them, and kill them.

Waiting is for an event (a pidfd that becomes readable), or for a fact that nothing announces
(:func:`wait_until`). Deadlines are hang guards: none of them is ever what a test measures.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from elasticrs._engine.supervise.attempt import file_text, memory_counters

Found = TypeVar("Found")

HANG = 60.0
"""Seconds after which a wait has hung; less than a test may take, so that the message says what hung."""

PR_SET_CHILD_SUBREAPER = 36
WALL = 0x40000000
"""``__WALL``: children with any exit signal."""

bystanders: set[int] = set()
"""Pids of the programs that tests run beside what they test, which end when the tests want it."""


HEADLESS = """
import ctypes, os, signal, threading

def go_on():
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
        signal.sigtimedwait([], 0.001)
    os.write(1, b"HEADLESS %d\\n" % os.getpid())
    os.close(1)
    threading.Event().wait()

threading.Thread(target=go_on).start()
ctypes.CDLL(None).pthread_exit(None)
"""
"""A program whose main thread ends; then it says its pid, and another thread goes on for ever."""

TRACKER_RUNS = """
from multiprocessing import resource_tracker
tracker = resource_tracker._resource_tracker._pid
while not int(open("/proc/%d/status" % tracker).read().partition("SigIgn:")[2].split()[0], 16) >> 14 & 1:
    pass
"""
"""Code that waits until the resource tracker of its process has started, and so ignores SIGTERM.

After the process is killed, the tracker has one second. On a loaded machine, it may take longer to start.
"""


def run_program(
    command: Sequence[str | Path], *, timeout: float = HANG, check: bool = False, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program until it exits, and return its exit code and output. ``how`` contains more arguments for
    :func:`subprocess.run`.
    """
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=check, **how)


class Process(NamedTuple):
    """A row of the process table. The combination of pid and start time is never reused."""

    pid: int
    started: int
    """Clock ticks since boot."""
    ppid: int
    state: str
    command: str

    def __str__(self) -> str:
        return f"{self.pid} ({self.state}) {self.command}"


def become_subreaper() -> None:
    """Make this process the new parent of descendants that lose their parent."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def process(pid: int) -> Process | None:
    """Return the process with this pid, even if it is a zombie. ``None`` if it does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        cmdline = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in parentheses and may contain any character, even parentheses.
    name, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()
    command = cmdline.replace(b"\0", b" ").decode(errors="replace").strip() or f"[{name}]"
    return Process(pid, int(fields[19]), int(fields[1]), fields[0], command)


def processes() -> list[Process]:
    return _existing(_parents())


def descendants(pid: int) -> list[Process]:
    """Return all descendants of ``pid``, parents before their children."""
    by_parent: dict[int, list[int]] = {}
    for each, parent in _parents().items():
        by_parent.setdefault(parent, []).append(each)
    found: list[int] = []
    pending = [pid]
    while pending:
        below = by_parent.get(pending.pop(), [])
        found += below
        pending += below
    return _existing(found)


def children(pid: int | None = None) -> list[Process]:
    """Return the children of ``pid`` (by default, of this process), including zombies and adopted
    children.
    """
    if pid is None:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | WALL)
        except ChildProcessError:
            # Return early, because this function runs before and after every test, and scanning the process
            # table takes milliseconds.
            return []
        pid = os.getpid()
    return _existing(each for each, parent in _parents().items() if parent == pid)


def _existing(pids: Iterable[int]) -> list[Process]:
    return [found for pid in pids if (found := process(pid)) is not None]


def _parents() -> dict[int, int]:
    """Return the parent's pid for each process of the machine."""
    found = {}
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat", "rb", buffering=0) as file:
                stat = file.read(4096)
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[int(entry)] = int(stat[stat.rindex(b")") + 2 :].split(None, 2)[1])
    return found


def nurseries(agent: int) -> list[Process]:
    """Return the nurseries of a launcher: its children that start workers, or will start them.

    Not those that have ended, which have no command line any more; nor the sentinel of an import, which is
    known by its argument.
    """
    found = [child for child in children(agent) if not child.command.startswith("[")]
    return [child for child in found if not child.command.rpartition(" ")[2].startswith("!")]


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """Create a memory cgroup as a child of this process's cgroup, with a limit in bytes. Skip the test if
    that is not possible here.
    """
    found = memory_counters(file_text("/proc/self/cgroup"), file_text("/proc/self/mountinfo"))
    for counter in found:
        group = Path(counter).parent / f"elasticrs-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            file = group / ("memory.max" if counter.endswith("memory.events") else "memory.limit_in_bytes")
            if file.exists():
                file.write_text(str(limit))
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("no memory cgroup can be created here")


def wait_readable(fd: int, timeout: float = HANG) -> bool:
    """Wait until ``fd`` is readable. A pidfd is readable when its process has exited. Return false after
    ``timeout`` seconds.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout) * 1000))


def wait_gone(pid: int, timeout: float = HANG) -> bool:
    """Wait until ``pid`` has exited, reaped or not. Return false after ``timeout`` seconds."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return wait_readable(pidfd, timeout)
    finally:
        os.close(pidfd)


def wait_until(look: Callable[[], Found], is_so: Callable[[Found], bool] = bool) -> Found:
    """Poll until ``is_so`` accepts the result of ``look``, and return that result. For conditions without a
    notification.
    """
    deadline = time.monotonic() + HANG
    while not is_so(seen := look()):
        assert time.monotonic() < deadline, f"still {seen!r} after {HANG} s"
        signal.sigtimedwait([], 0.002)
    return seen


def wait_state(pid: int, state: str) -> None:
    assert wait_until(lambda: process(pid), lambda now: now is None or now.state == state), f"{pid} is gone"


def assert_gone(pids: Iterable[int], timeout: float = HANG) -> None:
    """Assert that all of these processes exit by themselves within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    alive = [pid for pid in pids if not wait_gone(pid, deadline - time.monotonic())]
    assert not alive, f"still there after {timeout} s: {[str(process(pid)) for pid in alive]}"


def kill_and_reap(child: Process, timeout: float = HANG) -> None:
    """Kill a child of this process with SIGKILL, and reap it, unless its owner reaps it first.

    Raises:
        TimeoutError: it does not end (state D).
    """
    try:
        pidfd = os.pidfd_open(child.pid)
    except ProcessLookupError:
        return
    try:
        # Do not skip zombies: the signal does not harm them, and a process whose main thread has exited only
        # looks like one.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if not wait_readable(pidfd, timeout):
            raise TimeoutError(f"does not end after SIGKILL: {child}")
        reap(pidfd)
    finally:
        os.close(pidfd)


def reap(pidfd: int) -> None:
    """Reap a child that has exited, unless its owner reaps it first."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)


def adopted(keep: Iterable[int] = ()) -> list[Process]:
    """Return the processes that a test has left to this process: its children except for ``keep``,
    :data:`bystanders` and the resource tracker of this process.
    """
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    kept = {*keep, *bystanders, tracker}
    return [child for child in children() if child.pid not in kept]


def reap_adopted(keep: Iterable[int] = (), timeout: float = HANG) -> list[Process]:
    """Wait until all :func:`adopted` processes have exited by themselves, and reap them.

    For tests that kill an agent: its nursery, and whatever else it leaves for a moment, becomes a child of
    this process.
    A child that belongs to a :class:`subprocess.Popen` must be in ``keep``.

    Returns:
        Those that were collected.
    """
    kept = set(keep)
    deadline = time.monotonic() + timeout
    reaped: list[Process] = []
    while orphans := adopted(kept):
        for orphan in orphans:
            try:
                pidfd = os.pidfd_open(orphan.pid)
            except ProcessLookupError:
                continue  # Its owner has reaped it.
            try:
                assert wait_readable(pidfd, deadline - time.monotonic()), f"an orphan lives on: {orphan}"
                reap(pidfd)
            finally:
                os.close(pidfd)
            reaped.append(orphan)
    return reaped


def kill_adopted(keep: Iterable[int] = ()) -> None:
    """Kill and reap all :func:`adopted` processes, such as the resource trackers that torchrun and its
    workers leave behind.
    """
    kept = set(keep)
    while orphans := adopted(kept):
        for orphan in orphans:
            kill_and_reap(orphan)


INTERPRETERS = "ELASTICRS_TEST_INTERPRETERS"
"""Variable with the list of :func:`interpreters`, for the processes of one test run."""


@cache
def interpreters() -> list[str]:
    """Return the Python interpreters on this machine, one of each release.

    Return the interpreters themselves, because a program on PATH may be a slow script that runs one.
    """
    if INTERPRETERS in os.environ:
        known: list[str] = json.loads(os.environ[INTERPRETERS])
        return known
    found = {sys.version: sys.executable}
    shows = "import json, sys; print(json.dumps([sys.version, sys.executable]))"
    names = [*(f"python3.{minor}" for minor in range(8, 15)), "/usr/bin/python3"]
    for path in map(shutil.which, names):
        if path is not None:
            done = subprocess.run([path, "-c", shows], capture_output=True, check=False)
            if done.returncode == 0:
                found.setdefault(*json.loads(done.stdout))
    return list(found.values())
