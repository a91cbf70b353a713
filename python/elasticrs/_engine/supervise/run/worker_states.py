"""Looks at the workers in ``/proc``, for signals that the agent passes on, and for workers that hang in the
kernel.

SIGUSR1 and SIGUSR2 kill a process without a handler, for example while a worker imports modules or exits. The
agent holds a signal until the worker handles, ignores or blocks it.

- **PASS-1** A worker that does not handle, ignore or block a signal is never sent that signal.
- **PASS-2** A signal that arrives again while it is held for a process is delivered once, as in the kernel.
- **PASS-3** Each held signal is either delivered or reported to the user as dropped.
- **PASS-4** Without a ``/proc`` of its own pid namespace, the agent cannot see which signals a worker
  handles. In this case, it passes no signals on and tells the user.

Workers in uninterruptible sleep (``D``) cannot be killed. They wait for a device or file system that does not
respond, and hold resources that replacements need, so the job fails and is not restarted. Torch reports
success in this case. Short waits are normal, so a worker counts only if it was in this state at every check
for a certain time.
"""

from __future__ import annotations

import signal
import sys
import time

from elasticrs._engine.job import phrases
from elasticrs._engine.process.other_processes import has_own_proc, read_state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TICK = 0.05
"""Seconds between two attempts to deliver a held signal."""

PATIENCE = 60.0
"""Seconds after which a held signal is dropped."""

_EXITED = "before it exited"


def can_take(pid: int, signum: int) -> bool | None:
    """Return true if a process handles, ignores or blocks a signal; ``None`` if the process has exited."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            fields = dict(line.split(":", 1) for line in status if ":" in line)
        if fields["State"].split()[0] in "ZX":
            return None
        blocked, ignored, caught = (int(fields[name], 16) for name in ("SigBlk", "SigIgn", "SigCgt"))
    except (OSError, LookupError, ValueError):
        return None
    if _has(blocked, signal.SIGSEGV):
        # The C library briefly blocks all signals, even SIGSEGV, to start a process. Ignore that mask.
        blocked = 0
    return _has(blocked | ignored | caught, signum) or _waits_for(pid, signum)


def _waits_for(pid: int, signum: int) -> bool:
    """Return true if the main thread is in ``sigwait``. The kernel does not list its signals as blocked."""
    try:
        with open(f"/proc/{pid}/wchan", encoding="ascii") as wchan, open(f"/proc/{pid}/syscall") as syscall:
            if not wchan.read().startswith("do_sigtimedwait"):
                return False
            pointer = int(syscall.read().split()[1], 16)
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(pointer)
            return _has(int.from_bytes(memory.read(8), sys.byteorder), signum)
    except (OSError, LookupError, ValueError):
        return False


def _has(mask: int, signum: int) -> bool:
    return bool(mask >> (signum - 1) & 1)


class PassedSignals:
    """Delivers signals to the workers of one agent. ``send`` takes the signal and local ranks."""

    def __init__(
        self,
        send: Callable[[int, list[int]], None],
        say: Callable[[str], None],
        can_take: Callable[[int, int], bool | None] = can_take,
        now: Callable[[], float] = time.monotonic,
        has_own_proc: Callable[[], bool] = has_own_proc,
    ) -> None:
        self._send, self._say = send, say
        self._can_take, self._now, self._has_own_proc = can_take, now, has_own_proc
        # Arrival times (in monotonic seconds) of the held signals, by signal number, local rank and pid.
        self._held: dict[tuple[int, int, int], float] = {}

    def pass_on(self, signum: int, workers: Mapping[int, int]) -> Sequence[int]:
        """Send a signal to ``workers`` (pids by local rank), but hold it back for each worker that it would
        kill, because the worker has no handler for it. Return the local ranks that have not got the signal.
        """
        if not self._has_own_proc():
            self._say(phrases.signal_not_passed_on(signum))
            return sorted(workers)
        for rank, pid in workers.items():
            self._held.setdefault((signum, rank, pid), self._now())
        gone = self._deliver(workers)
        held = [key[1] for key in self._held if key[0] == signum and key not in gone]
        exited = {key[1] for key in gone}
        sent = [rank for rank in workers if rank not in exited and rank not in held]
        self._say(phrases.passed_on(signum, sent, held, PATIENCE))
        self._drop(gone, _EXITED)
        return held

    def look(self, workers: Mapping[int, int]) -> float | None:
        """Deliver or drop held signals. Return the seconds until the next call; ``None`` if none is held."""
        if not self._held:
            return None
        self._drop(self._deliver(workers), _EXITED)
        late = {key for key, since in self._held.items() if self._now() - since > PATIENCE}
        self._drop(late, f"for {PATIENCE:g} s")
        return TICK if self._held else None

    def _deliver(self, workers: Mapping[int, int]) -> set[tuple[int, int, int]]:
        """Deliver the signals that workers can now receive. Return those of workers that have exited."""
        ready: dict[int, list[int]] = {}
        gone = set()
        for key in self._held:
            signum, rank, pid = key
            takes = self._can_take(pid, signum) if workers.get(rank) == pid else None
            if takes:
                ready.setdefault(signum, []).append(rank)
            elif takes is None:
                gone.add(key)
        for signum, ranks in ready.items():
            self._send(signum, ranks)
            for rank in ranks:
                del self._held[signum, rank, workers[rank]]
        return gone

    def _drop(self, keys: set[tuple[int, int, int]], when: str) -> None:
        for signum in sorted({key[0] for key in keys}):
            ranks = sorted(rank for number, rank, _ in keys if number == signum)
            self._say(phrases.signal_dropped(signum, ranks, when))
        for key in keys:
            del self._held[key]


_LOOKS = 4
"""Minimum number of checks within the time limit."""

_LONGEST = 1.0
"""Maximum number of seconds between two checks."""


def since(earlier: Mapping[int, float], states: Mapping[int, str], now: float) -> dict[int, float]:
    """Return when each process was first seen in uninterruptible sleep (state ``D``), by pid."""
    return {pid: earlier.get(pid, now) for pid, state in states.items() if state == "D"}


def overdue(first_seen: Mapping[int, float], now: float, limit: float) -> dict[int, float]:
    """Return the processes that have slept for at least ``limit`` seconds, and for how many seconds."""
    if limit <= 0:
        return {}
    return {pid: now - start for pid, start in first_seen.items() if now - start >= limit}


class Sleepers:
    """Finds workers that have slept for more than ``limit`` seconds; none if ``limit`` is not positive."""

    def __init__(self, limit: float, proc: str = "/proc") -> None:
        # Disable the check if ``/proc`` is of another pid namespace, where the workers have other pids.
        self._limit = limit = limit if has_own_proc() else 0.0
        self._proc = proc
        self._next = 0.0
        self._first_seen: dict[int, float] = {}
        self.interval = min(_LONGEST, limit / _LOOKS) if limit > 0 else float("inf")

    def look(self, pids: Mapping[int, int]) -> dict[int, float]:
        """Return the sleep times that exceed the limit, by local rank; empty between two checks."""
        now = time.monotonic()
        if self._limit <= 0 or now < self._next:
            return {}
        self._next = now + self.interval
        states = {pid: state for pid in pids.values() if (state := read_state(pid, self._proc))}
        self._first_seen = since(self._first_seen, states, now)
        slept = overdue(self._first_seen, now, self._limit)
        return {local_rank: slept[pid] for local_rank, pid in pids.items() if pid in slept}
