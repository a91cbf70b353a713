"""What an agent and its workers of :mod:`elasticrs.train` tell each other: a page of memory that they share.

A look at it, or a word into it, is no message and no system call: it can be afforded after each step. The
agent asks for a checkpoint by counting requests; workers that have been through a save count up to there what
is served. So a request outlasts the workers that have seen it, and requests that overlap share a checkpoint.
"""

from __future__ import annotations

import fcntl
import os
import time
from math import isfinite
from mmap import mmap

from elasticrs._value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal, TypeAlias

    Result: TypeAlias = Literal["saved", "failed", "no manager"]

VARIABLE = "ELASTICRS_TRAIN_PAGE"

RATE_INTERVAL = 1_000_000_000
"""Nanoseconds between two rates that a worker tells: to know one may take long, on a GPU."""

# By words of 8 bytes.
_MARK, _ASKED, _SERVED, _RESULT, _SERVED_NS = range(5)
_FIRST, _SPAN = 16, 16
_PID, _RANK, _WORLD, _ROUND, _STEPS, _STEP_NS, _HAS_RATE, _RATE, _HAS_FINISHED = range(9)
_RESULTS: tuple[Result, ...] = ("saved", "failed", "no manager")


class Standing(Value):
    """What one worker says of itself.

    Args:
        local_rank: its place on this node.
        pid: of the process.
        rank: in the present round; ``None`` before its first one.
        world_size: of that round.
        round: its number, from 1; 0 before the first.
        steps: that it has done in this process.
        step_ns: when the last one ended, on the monotonic clock.
        rate: of its ``WorkerStats``; ``None``: it gives none.
    """

    local_rank: int
    pid: int
    rank: int | None
    world_size: int
    round: int
    steps: int
    step_ns: int
    rate: float | None


class Met(Value):
    """A worker's last meeting with the others.

    Args:
        round: its number, from 1.
        rank: of the worker.
    """

    round: int
    rank: int


class AgentPage:
    """The agent's side.

    Args:
        workers: of this node.

    Attributes:
        variable: what workers find in :data:`VARIABLE`.

    Raises:
        OSError: no memory, no descriptor.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._was_used = False
        size = 8 * (_FIRST + _SPAN * workers)
        self._fd = os.memfd_create("elasticrs-node", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, size)
        # Seal the size, because a worker that truncates the file would crash the agent.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = mmap(self._fd, size)
        self._bytes = memoryview(self._map)
        self._words, self._floats = self._bytes.cast("Q"), self._bytes.cast("d")
        # Write a random mark, because in another pid namespace the path may lead to another file.
        self._words[_MARK] = mark = int.from_bytes(os.urandom(7), "big")
        self.variable = f"{mark}:/proc/{os.getpid()}/fd/{self._fd}"

    def ask(self) -> int:
        """Ask the workers for a checkpoint; return the number of this request."""
        self._words[_ASKED] += 1
        return self._words[_ASKED]

    @property
    def asked(self) -> int:
        """How many requests there have been."""
        return self._words[_ASKED]

    def answer(self) -> tuple[int, Result, int]:
        """Return how many requests have been served, what came of the last ones, and when that was, in ns of
        the monotonic clock.
        """
        served = self._words[_SERVED]
        result = min(self._words[_RESULT], len(_RESULTS) - 1)
        return served, _RESULTS[result], self._words[_SERVED_NS]

    def standings(self) -> list[Standing]:
        """Return what the workers that take part say of themselves, by local rank."""
        found = [self._standing(local_rank) for local_rank in range(self._workers)]
        return [each for each in found if each.pid]

    def _standing(self, local_rank: int) -> Standing:
        at = _FIRST + _SPAN * local_rank
        pid, rank, world, number, steps, step_ns, has_rate = self._words[at : at + _RATE].tolist()
        rate = self._floats[at + _RATE] if has_rate else None
        if rate is not None and not isfinite(rate):
            # A worker may write infinity or NaN here, which JSON cannot represent.
            rate = None
        return Standing(local_rank, pid, rank - 1 if rank else None, world, number, steps, step_ns, rate)

    def last_met(self, local_rank: int) -> Met | None:
        """Return the last meeting of a worker; ``None`` before the first one, and when this is closed."""
        if self._fd < 0:
            return None
        standing = self._standing(local_rank)
        return None if standing.rank is None else Met(standing.round, standing.rank)

    def meetings(self) -> tuple[int | None, ...]:
        """Return the numbers of the last meetings of all workers, by local rank."""
        found = map(self.last_met, range(self._workers))
        return tuple(None if met is None else met.round for met in found)

    def is_training(self, local_rank: int) -> bool:
        """True if a worker has met the others, and its training has not ended."""
        at = _FIRST + _SPAN * local_rank
        return bool(self._words[at + _ROUND]) and not self._words[at + _HAS_FINISHED]

    def clear(self, local_rank: int) -> None:
        """Delete the data of a worker that has exited, because no worker runs in its place now."""
        at = _FIRST + _SPAN * local_rank
        self._was_used = self.was_used
        for word in range(at, at + _SPAN):
            self._words[word] = 0

    @property
    def was_used(self) -> bool:
        """Return true if any worker has used ``elasticrs.train``, even if that worker was replaced since."""
        return self._was_used or bool(self.standings())

    def close(self) -> None:
        """Release it. Idempotent."""
        if self._fd >= 0:
            for view in (self._words, self._floats, self._bytes):
                view.release()
            self._map.close()
            os.close(self._fd)
            self._fd = -1


class WorkerPage:
    """A worker's side: of the process that opens it alone.

    Args:
        words: the whole page.
        local_rank: of this worker.
    """

    def __init__(self, words: memoryview, local_rank: int) -> None:
        self._all = words
        at = _FIRST + _SPAN * local_rank
        self._own = own = words[at : at + _SPAN]
        self._rate = own.cast("B").cast("d")
        for word in range(_SPAN):
            own[word] = 0
        own[_PID] = os.getpid()
        self._steps = self._rate_due = 0

    @property
    def is_asked(self) -> bool:
        """True if the agent waits for a checkpoint."""
        words = self._all
        return bool(words[_ASKED] > words[_SERVED])

    @property
    def asked(self) -> int:
        """How many requests there have been: what a save that begins now serves."""
        return self._all[_ASKED]

    def serve(self, asked: int, result: Result) -> None:
        """Tell the agent what has come of its requests, up to this one."""
        words = self._all
        if asked > words[_SERVED]:
            words[_RESULT] = _RESULTS.index(result)
            words[_SERVED_NS] = time.monotonic_ns()
            words[_SERVED] = asked

    def place(self, rank: int, world_size: int, number: int) -> None:
        """Tell the place of this worker in the round that begins, and the number of that."""
        own = self._own
        own[_RANK], own[_WORLD], own[_ROUND] = rank + 1, world_size, number
        own[_HAS_FINISHED] = 0

    def finish(self) -> None:
        """Tell that the training has ended."""
        self._own[_HAS_FINISHED] = 1

    def stepped(self) -> bool:
        """Count a step; true if it is time for :meth:`tell_rate`."""
        own = self._own
        self._steps = own[_STEPS] = self._steps + 1
        now = own[_STEP_NS] = time.monotonic_ns()
        if now < self._rate_due:
            return False
        self._rate_due = now + RATE_INTERVAL
        return True

    def tell_rate(self, rate: float | None) -> None:
        """Tell how fast this worker is; ``None``: that is not known."""
        self._rate[_RATE], self._own[_HAS_RATE] = rate or 0.0, int(rate is not None)


def page_of(environ: Mapping[str, str]) -> WorkerPage | None:
    """Return the page that the agent of this worker shares; ``None``: there is none, or it cannot be had."""
    mark, _, path = environ.get(VARIABLE, "").partition(":")
    try:
        local_rank = int(environ["LOCAL_RANK"])
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            words = memoryview(mmap(fd, 0)).cast("Q")
        finally:
            os.close(fd)
        is_ours = words[_MARK] == int(mark) and len(words) >= _FIRST + _SPAN * (local_rank + 1)
    except (KeyError, OSError, TypeError, ValueError, IndexError):
        # Nothing depends on it but requests and rates; the agent says that nobody takes part.
        return None
    return WorkerPage(words, local_rank) if is_ours else None
