"""Signals that the agent passes on to its workers.

The default action of SIGUSR1 and SIGUSR2 ends a process. So a worker gets such a signal only while it
handles, ignores or blocks it. For a worker that does not, because it is still importing or already exiting,
the signal is held.

- **PASS-1** a worker without a handler for a signal is never sent that signal;
- **PASS-2** a signal that is held several times for one process is delivered once, as by the kernel;
- **PASS-3** a signal that is held is delivered, or a line says that it was dropped.
"""

from __future__ import annotations

import signal
import sys
import time
from math import inf

from elasticrs import texts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TICK = 0.05
"""Seconds between two checks of whether a worker can take a signal that is held."""

PATIENCE = 60.0
"""Seconds after which a signal that is held is dropped."""


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
        # The C library blocks every signal for a moment while it starts a process.
        blocked = 0
    return _has(blocked | ignored | caught, signum) or _waits_for(pid, signum)


def _waits_for(pid: int, signum: int) -> bool:
    """Return true if the main thread of a process is in ``sigwait`` for a signal.

    The kernel does not list the signals of that wait as blocked, so they are read from the arguments.
    """
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
    """Delivers signals to the workers of one agent, and holds those that a worker cannot take yet.

    Args:
        send: sends a signal to workers, by their local ranks.
        say: prints a line for the user.
        can_take: see :func:`can_take`.
        now: returns the time in seconds.
    """

    def __init__(
        self,
        send: Callable[[int, list[int]], None],
        say: Callable[[str], None],
        can_take: Callable[[int, int], bool | None] = can_take,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send, self._say = send, say
        self._can_take, self._now = can_take, now
        # When each signal was held first, by signal, local rank and pid.
        self._held: dict[tuple[int, int, int], float] = {}

    def pass_on(self, signum: int, workers: Mapping[int, int]) -> None:
        """Deliver a signal to running workers, given as pids by local rank, or hold it."""
        for rank, pid in workers.items():
            self._held.setdefault((signum, rank, pid), self._now())
        self._deliver(workers)
        held = [rank for number, rank, _ in self._held if number == signum]
        self._say(texts.passed_on(signum, held))

    def look(self, workers: Mapping[int, int]) -> float:
        """Deliver or drop what is held; return the seconds until the next call is due."""
        if not self._held:
            return inf
        self._deliver(workers)
        late = {key for key, since in self._held.items() if self._now() - since > PATIENCE}
        self._drop(late, f"for {PATIENCE:g} s")
        return TICK if self._held else inf

    def _deliver(self, workers: Mapping[int, int]) -> None:
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
        self._drop(gone, "before it exited")

    def _drop(self, keys: set[tuple[int, int, int]], when: str) -> None:
        for signum in sorted({key[0] for key in keys}):
            ranks = sorted(rank for number, rank, _ in keys if number == signum)
            self._say(texts.signal_dropped(signum, ranks, when))
        for key in keys:
            del self._held[key]
