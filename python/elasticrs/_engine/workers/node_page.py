"""Memory page that an agent shares with its workers, if they use :mod:`elasticrs.train`.

Workers check it for requests without a system call. After a save, they set the number of served requests to
that of the requests at the start of the save, so that no request is lost and one save can serve several.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from math import isfinite
from mmap import mmap
from threading import Lock

from elasticrs._engine.job import phrases
from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Literal, TypeAlias

    Result: TypeAlias = Literal["saved", "failed", "no manager"]

VARIABLE = "ELASTICRS_TRAIN_PAGE"

RATE_INTERVAL = 1_000_000_000
"""Minimum nanoseconds between two reports of a worker's training rate. Measuring it may be slow on a GPU."""

TICK = 0.02
"""Seconds between two checks whether a checkpoint request has a result."""

PATIENCE = 60.0
"""Seconds after a checkpoint request after which the agent warns the user if there is no result yet."""

# Offsets into the page, in 8-byte words.
_MARK, _ASKED, _SERVED, _RESULT, _SERVED_NS = range(5)
_FIRST, _SPAN = 16, 16
_PID, _RANK, _WORLD, _ROUND, _STEPS, _STEP_NS, _HAS_RATE, _RATE, _HAS_FINISHED = range(9)
_RESULTS: tuple[Result, ...] = ("saved", "failed", "no manager")


class Standing(Value):
    """Training progress of a worker. Before its first rendezvous, ``rank`` is ``None`` and ``round`` is 0.
    ``step_ns`` is the time at which the last step ended, in nanoseconds of the monotonic clock.
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
    """A worker's last rendezvous: its number (``round``) and its result."""

    round: int
    rank: int


class AgentPage:
    """Agent's access to the memory page that it shares with its workers. ``variable`` is the value of their
    environment variable :data:`VARIABLE`, which tells them where the page is.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._was_used = False
        size = 8 * (_FIRST + _SPAN * workers)
        self._fd = os.memfd_create("elasticrs-node", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, size)
        # Seal the file size, because a worker that truncated the file would crash the agent.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = mmap(self._fd, size)
        self._bytes = memoryview(self._map)
        self._words, self._floats = self._bytes.cast("Q"), self._bytes.cast("d")
        # Put a random number into the page. Workers compare it with the number in `variable`, because in
        # another pid namespace, the path may lead to another file.
        self._words[_MARK] = mark = int.from_bytes(os.urandom(7), "big")
        self.variable = f"{mark}:/proc/{os.getpid()}/fd/{self._fd}"

    def ask(self) -> int:
        """Request a checkpoint from the workers. Return the number of the request."""
        self._words[_ASKED] += 1
        return self._words[_ASKED]

    @property
    def asked(self) -> int:
        return self._words[_ASKED]

    def answer(self) -> tuple[int, Result, int]:
        """Return the number of served requests, and result and monotonic time (ns) of the last checkpoint."""
        served = self._words[_SERVED]
        result = min(self._words[_RESULT], len(_RESULTS) - 1)
        return served, _RESULTS[result], self._words[_SERVED_NS]

    def standings(self) -> list[Standing]:
        """Return the progress of the workers that use ``elasticrs.train``, by local rank."""
        found = [self._standing(local_rank) for local_rank in range(self._workers)]
        return [each for each in found if each.pid]

    def _standing(self, local_rank: int) -> Standing:
        at = _FIRST + _SPAN * local_rank
        pid, rank, world, number, steps, step_ns, has_rate = self._words[at : at + _RATE].tolist()
        rate = self._floats[at + _RATE] if has_rate else None
        if rate is not None and not isfinite(rate):
            rate = None  # JSON cannot represent it.
        return Standing(local_rank, pid, rank - 1 if rank else None, world, number, steps, step_ns, rate)

    def last_met(self, local_rank: int) -> Met | None:
        """Return the last rendezvous of a worker; ``None`` if it has had none or this page is closed."""
        if self._fd < 0:
            return None
        standing = self._standing(local_rank)
        return None if standing.rank is None else Met(standing.round, standing.rank)

    def meetings(self) -> tuple[int | None, ...]:
        """Return the number of each worker's last rendezvous; ``None`` for a worker that has had none."""
        found = map(self.last_met, range(self._workers))
        return tuple(None if met is None else met.round for met in found)

    def is_training(self, local_rank: int) -> bool:
        at = _FIRST + _SPAN * local_rank
        return bool(self._words[at + _ROUND]) and not self._words[at + _HAS_FINISHED]

    def final_world_size(self) -> int | None:
        """Return the last rendezvous's number of workers; ``None`` without one, or if workers still train."""
        if self._fd < 0:
            return None
        met = [each for each in self.standings() if each.rank is not None]
        if not met or any(self.is_training(each.local_rank) for each in met):
            return None
        return max(each.world_size for each in met)

    def clear(self, local_rank: int) -> None:
        """Delete the data of the previous worker with this local rank, before its replacement starts."""
        at = _FIRST + _SPAN * local_rank
        self._was_used = self.was_used
        for word in range(at, at + _SPAN):
            self._words[word] = 0

    @property
    def was_used(self) -> bool:
        """True if any worker has used ``elasticrs.train``, even one that has been replaced."""
        return self._was_used or bool(self.standings())

    def close(self) -> None:
        if self._fd >= 0:
            for view in (self._words, self._floats, self._bytes):
                view.release()
            self._map.close()
            os.close(self._fd)
            self._fd = -1


class CheckpointRequests:
    """An agent's checkpoint requests to its workers. Each one makes ``fd`` readable, to wake the agent."""

    def __init__(self, workers: int, say: Callable[[str], None]) -> None:
        self.page = AgentPage(workers)
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._say = say
        self._lock = Lock()
        self._told = 0
        self._asked_ns: dict[int, int] = {}
        self._is_late = False

    @property
    def variables(self) -> dict[str, str]:
        return {VARIABLE: self.page.variable}

    def ask(self) -> None:
        """Request a checkpoint, from any thread. Raises ``RuntimeError`` if the agent has stopped."""
        with self._lock:
            if self.fd < 0:
                raise RuntimeError("the agent has ended")
            asked_ns = time.monotonic_ns()
            self._asked_ns[self.page.ask()] = asked_ns
            os.eventfd_write(self.fd, 1)

    def take(self) -> None:
        """Make ``fd`` unreadable. No request is lost, because a counter in shared memory counts them."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    @property
    def are_open(self) -> bool:
        return self.page.asked > self._told

    def look(self) -> float:
        """Print a line about each checkpoint request that has a result. Return the seconds until this method
        must be called again; infinity if no request is open.
        """
        served, result, served_ns = self.page.answer()
        first = self._asked_ns.get(self._told + 1)
        if served > self._told and first is not None:
            self._say(phrases.checkpoint_line(result, served_ns - first))
            for number in range(self._told + 1, served + 1):
                self._asked_ns.pop(number, None)
            self._told, self._is_late = served, False
        elif first is not None and not self._is_late and time.monotonic_ns() - first > PATIENCE * 1e9:
            self._is_late = True
            self._say(phrases.checkpoint_is_late(PATIENCE, len(self.page.standings())))
        return TICK if self.are_open else float("inf")

    def close(self) -> None:
        with self._lock:
            self.page.close()
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1


class WorkerPage:
    """A worker's access to the page shared with the agent. Forks of the worker must not use this object."""

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
        words = self._all
        return bool(words[_ASKED] > words[_SERVED])

    @property
    def asked(self) -> int:
        """Number of checkpoints requested by the agent so far. A save that starts now serves all of them."""
        return self._all[_ASKED]

    def serve(self, asked: int, result: Result) -> None:
        """Report the result of a save, which serves all checkpoint requests up to the number ``asked``."""
        words = self._all
        if asked > words[_SERVED]:
            words[_RESULT] = _RESULTS.index(result)
            words[_SERVED_NS] = time.monotonic_ns()
            words[_SERVED] = asked

    def place(self, rank: int, world_size: int, number: int) -> None:
        """Publish this worker's rank, and the size and number of the rendezvous round that is starting."""
        own = self._own
        own[_RANK], own[_WORLD], own[_ROUND] = rank + 1, world_size, number
        own[_HAS_FINISHED] = 0

    def finish(self) -> None:
        self._own[_HAS_FINISHED] = 1

    def stepped(self) -> bool:
        """Count a training step. Return true if it is time to call :meth:`tell_rate`."""
        own = self._own
        self._steps = own[_STEPS] = self._steps + 1
        now = own[_STEP_NS] = time.monotonic_ns()
        if now < self._rate_due:
            return False
        self._rate_due = now + RATE_INTERVAL
        return True

    def tell_rate(self, rate: float | None) -> None:
        self._rate[_RATE], self._own[_HAS_RATE] = rate or 0.0, int(rate is not None)


def page_of(environ: Mapping[str, str]) -> WorkerPage | None:
    """Return this worker's page; ``None`` if there is none or it cannot be opened."""
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
        return None  # The agent will report that no worker uses the page.
    return WorkerPage(words, local_rank) if is_ours else None
