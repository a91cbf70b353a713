"""A guard around every test that fails if the test leaves a process, a descriptor or a thread behind.

The process of the tests is a child subreaper, so that whatever a test leaves behind, however deep, ends up
as its child: the list of children is the whole truth. What is found is named, killed, and fails the test.
"""

import gc
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers import procs

ALLOWED_CHILDREN = (
    # multiprocessing starts its tracker for the first semaphore or shared memory. The tracker lives as long
    # as this process.
    re.compile(r"from multiprocessing\.resource_tracker import main"),
)


class Snapshot(NamedTuple):
    """The children, descriptors and threads of this process at one moment."""

    children: frozenset[tuple[int, int]]
    descriptors: Counter[str]
    threads: frozenset[int]


def snapshot() -> Snapshot:
    """Record the children by pid and start time, the descriptors by target, and the threads by kernel id."""
    return Snapshot(
        frozenset((child.pid, child.started) for child in procs.children()),
        descriptors(),
        frozenset(int(tid) for tid in os.listdir("/proc/self/task")),
    )


def descriptors() -> Counter[str]:
    """Count the open descriptors by target, except for the one that lists them."""
    targets: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets[os.readlink(f"/proc/self/fd/{fd}")] += 1
        except FileNotFoundError:
            continue  # the descriptor that `os.listdir` had open
    return targets


def end_children(before: Snapshot, timeout: float = procs.HANG) -> list[str]:
    """Kill all children that are not in ``before``, and return their names.

    Killing one may orphan others: again, until none is new. A child that does not end within ``timeout``
    seconds (state D) stays, and the others are killed nevertheless.
    """
    named: list[str] = []
    stuck: set[int] = set()
    while new := [child for child in procs.children() if is_leak(child, before) and child.pid not in stuck]:
        for child in new:
            named.append(f"process {child}")
            try:
                procs.kill_and_reap(child, timeout)
            except TimeoutError:
                stuck.add(child.pid)
                named[-1] += ", which does not end after SIGKILL"
    return named


def is_leak(child: procs.Process, before: Snapshot) -> bool:
    return (child.pid, child.started) not in before.children and not any(
        allowed.search(child.command) for allowed in ALLOWED_CHILDREN
    )


def new_descriptors(before: Snapshot) -> list[str]:
    """Return the descriptors that are not in ``before``. Collect garbage first, because unreachable objects
    are not leaks.
    """
    if descriptors() - before.descriptors:
        gc.collect()
    return [f"descriptor -> {target} (x{n})" for target, n in (descriptors() - before.descriptors).items()]


def new_threads(before: Snapshot, timeout: float = 2.0) -> list[str]:
    """Return the threads that are not in ``before``.

    A thread that was joined is in the list for some microseconds more, and nothing tells when it has gone:
    hence the looks at intervals, which cost time only when there is something to see.
    """
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while new := {int(tid) for tid in os.listdir("/proc/self/task")} - before.threads:
        if time.monotonic() > deadline:
            return [f"thread {tid} {thread_name(tid)}" for tid in sorted(new)]
        pause.wait(0.002)
    return []


def thread_name(tid: int) -> str:
    try:
        return Path(f"/proc/self/task/{tid}/comm").read_text(encoding="utf-8").strip()
    except (FileNotFoundError, ProcessLookupError):
        return "(gone)"


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a process, a descriptor or a thread behind."""
    procs.become_subreaper()
    before = snapshot()
    yield
    left = end_children(before) + new_threads(before) + new_descriptors(before)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)
