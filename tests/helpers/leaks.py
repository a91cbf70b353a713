"""A guard around every test: no process, descriptor or thread is left.

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
    # Started by multiprocessing with the first semaphore or shared memory; it lives as long as this process.
    re.compile(r"from multiprocessing\.resource_tracker import main"),
)


class Snapshot(NamedTuple):
    """What this process has at one moment."""

    children: frozenset[tuple[int, int]]
    descriptors: Counter[str]
    threads: frozenset[int]


def snapshot() -> Snapshot:
    """Children by pid and start time, descriptors by what they refer to, threads by kernel id."""
    return Snapshot(
        frozenset((child.pid, child.started) for child in procs.children()),
        descriptors(),
        frozenset(int(tid) for tid in os.listdir("/proc/self/task")),
    )


def descriptors() -> Counter[str]:
    """Open descriptors by target; the one that reads the list is not among them."""
    targets: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets[os.readlink(f"/proc/self/fd/{fd}")] += 1
        except FileNotFoundError:
            continue  # the descriptor of listdir itself
    return targets


def end_children(before: Snapshot) -> list[str]:
    """Name and end all children that ``before`` does not hold.

    Killing one may orphan others: again, until none is new.
    """
    named: list[str] = []
    while new := [child for child in procs.children() if is_leak(child, before)]:
        for child in new:
            named.append(f"process {child}")
            procs.kill_and_reap(child)
    return named


def is_leak(child: procs.Process, before: Snapshot) -> bool:
    return (child.pid, child.started) not in before.children and not any(
        allowed.search(child.command) for allowed in ALLOWED_CHILDREN
    )


def new_descriptors(before: Snapshot) -> list[str]:
    """Descriptors that ``before`` does not hold; collects first: the unreachable is no leak of ours."""
    if descriptors() - before.descriptors:
        gc.collect()
    return [f"descriptor -> {target} (x{n})" for target, n in (descriptors() - before.descriptors).items()]


def new_threads(before: Snapshot, timeout: float = 2.0) -> list[str]:
    """Threads that ``before`` does not hold.

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
    """Fails the test that leaves a process, a descriptor or a thread."""
    procs.become_subreaper()
    before = snapshot()
    yield
    left = end_children(before) + new_threads(before) + new_descriptors(before)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)
