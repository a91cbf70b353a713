"""When the periodic copies are made.

All ranks must copy the same steps, because a step is lost of which one rank has no part. They cannot ask each
other without delaying the training. Therefore, rank 0 announces each copy some steps ahead, in its file.
"""

from __future__ import annotations

from math import ceil
from time import monotonic_ns

from elasticrs._engine.inside.keep.file import KeepFile, OffError
from elasticrs._engine.inside.keep.layout import Head, Mode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_CHECKED = 2
"""Number of the step, counted from the start of the process, whose copies show if the state is replicated."""

_SHARE = 0.01
"""Share of the time for which copies may block the training."""

_AHEAD = 2
"""Minimum number of steps from an announcement to the copy. Other ranks may be one step ahead of rank 0."""

_FIRST_AHEAD = 3
"""Number of steps from the check to the next copy. Ranks that exchange their states only in every second step
have equal states at one of these copies at most.
"""

_REPLICATED_NS = 60_000_000_000
"""Minimum nanoseconds between two copies of a state that each rank has, because a survivor can copy it."""

_FIXED = 10
"""Number of steps between two copies if the files of the other ranks cannot be read."""


class Schedule:
    """Decides which steps are copied.

    Args:
        words: words of the head of this rank's file.
        places: places of the files of all ranks, by rank.
        rank: this rank.
        every: see :class:`.Keeper`.
        mode: a code of :class:`.Mode`.
    """

    def __init__(
        self, words: memoryview, places: Sequence[str], rank: int, every: int | None, mode: int
    ) -> None:
        self._words, self._places, self._rank = words, places, rank
        self._every, self._mode = every, mode
        self._peers: list[KeepFile] | None = None
        self._count = 0
        self._before: int | None = None
        self._has_copied = False
        self._announced: int | None = None
        self._began_ns = monotonic_ns()
        self._blocked_ns = 0

    def next(self, step: int, *, is_idle: bool) -> tuple[bool, bool]:
        """Return whether a step that has ended is to be copied, and if its copy is the one for the check.
        ``is_idle`` is true if no copy runs.
        """
        before = step - 1 if self._before is None else self._before
        self._count, self._before = self._count + 1, step
        if self._count == 1:
            self._began_ns = monotonic_ns()
        is_check = self._mode == Mode.AUTO and self._count == _CHECKED
        if self._every is not None:
            is_due = self._every > 0 and step // self._every > before // self._every
        elif self._leader() is None:
            is_due = step // _FIXED > before // _FIXED
        else:
            is_due = self._is_announced(before, step, is_idle)
        # A rank that copies two steps in a row has nothing older. Another rank, without the first of them if
        # it dies while it copies it, has nothing newer.
        is_before_check = self._mode == Mode.AUTO and self._count == _CHECKED - 1
        self._has_copied = is_check or (is_due and not self._has_copied and not is_before_check)
        return self._has_copied, is_check

    def _is_announced(self, before: int, step: int, is_idle: bool) -> bool:
        leader = self._leader()
        assert leader is not None
        is_due = before < leader[Head.NEXT] - 1 <= step
        # Once rank 0 has ended a step, all others have ended the one before, and seen its announcement.
        is_seen = self._announced is None or step > self._announced
        if self._rank == 0 and self._count >= _CHECKED and is_idle and is_seen:
            # Copy a first time soon, so that the costs are known.
            interval = self._interval() if self._announced is not None else _FIRST_AHEAD
            self._announced = step + interval * (step - before)
            self._words[Head.NEXT] = self._announced + 1
        return is_due

    def _interval(self) -> int:
        """Return the number of steps to the next copy, from what the last one has cost."""
        step_ns = max(1, (monotonic_ns() - self._began_ns) // max(1, self._count - 1))
        blocked, self._blocked_ns = (
            self._words[Head.BLOCKED_NS] - self._blocked_ns,
            self._words[Head.BLOCKED_NS],
        )
        least = _REPLICATED_NS / step_ns if self.is_replicated() else 0
        return max(_AHEAD, ceil(blocked / (_SHARE * step_ns)), ceil(least))

    def is_replicated(self) -> bool:
        """Return true if each rank has the whole state. It is taken to be so before the first check."""
        if self._mode != Mode.AUTO:
            return self._mode == Mode.REPLICATED
        if not self._words[Head.CHECK_STEP]:
            return True
        checks = {(each[Head.CHECK_STEP], each[Head.CHECK_DIGEST]) for each in self._others()}
        return checks == {(self._words[Head.CHECK_STEP], self._words[Head.CHECK_DIGEST])}

    def declare_sharded(self) -> None:
        """Take note that this rank has only a part of the state."""
        self._mode = self._words[Head.MODE] = Mode.SHARDED

    def have_all_copied(self, step: int) -> bool | None:
        """Return whether each rank has a complete copy of a step; ``None`` if that cannot be seen."""
        self._others()
        try:
            return all(each.has_copy(step) for each in self._peers) if self._peers else None
        except (OSError, OffError):
            return None  # The agent has ended, and the files with it.

    def newest_ended(self) -> int:
        """Return the newest step that a rank has ended; -1 if there is none."""
        return max((each[Head.ENDED] for each in self._others()), default=0) - 1

    def do_starts_differ(self) -> bool:
        """Return true if a rank has not, or not yet, gone on from the same step as this one."""
        own = self._words[Head.RESTORED]
        return any(each[Head.PID] and each[Head.RESTORED] != own for each in self._others())

    def ranks_from_elsewhere(self) -> tuple[list[int], bool]:
        """Return the ranks that have gone on from another step than this one. Also return whether that is
        known of all ranks, because each has ended a step.
        """
        own, heads = self._words[Head.RESTORED], self._others()
        ended = [rank for rank, each in enumerate(heads) if each[Head.ENDED]]
        return [rank for rank in ended if heads[rank][Head.RESTORED] != own], len(ended) == len(heads)

    def close(self) -> None:
        """Remove the mappings of the other ranks' files."""
        for each in self._peers or ():
            each.close()
        self._peers = []

    def _leader(self) -> memoryview | None:
        heads = self._others()
        return heads[0] if heads else None

    def _others(self) -> list[memoryview]:
        """Return the heads of the files of all ranks; nothing if they cannot be read."""
        if self._peers is None:
            try:
                self._peers = [KeepFile(place) for place in self._places]
            except OffError:
                self._peers = []
        return [each.words for each in self._peers]
