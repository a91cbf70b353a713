"""Decides at the end of which training steps the ranks copy their states periodically.

All ranks must copy the same steps, because a step cannot be restored if one rank lacks its part of the state.
They cannot ask each other without delaying the training. Therefore, rank 0 announces each copy some steps
ahead, in its file (memory that the other ranks on the node can read).
"""

from __future__ import annotations

from math import ceil
from threading import Condition
from time import monotonic_ns

from elasticrs._engine.inside.keep.file import KeepFile, OffError
from elasticrs._engine.inside.keep.layout import Head, Mode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_CHECKED = 2
"""Number of the process's step whose copies are compared, to find out if all ranks have the same state."""

_SHARE = 0.01
"""Maximum share of the time for which periodic copies may block the training."""

_AHEAD = 2
"""Minimum number of steps from rank 0's announcement to the copy, as other ranks may be one step ahead."""

_FIRST_AHEAD = 3
"""Number of steps from the first copy, by which the ranks find out if they have the same state, to the next
one. It is odd, because ranks that average their parameters only in every second step then have equal states
at only one of the two copies.
"""

_REPLICATED_NS = 60_000_000_000
"""Minimum nanoseconds between two periodic copies if all ranks have the same state. Few are needed then,
because any rank that survives a failure can still copy the newest state.
"""

_FIXED = 10
"""Number of steps between two copies if this process cannot read the announcements in rank 0's file."""


class Generations:
    """The periodic copies on which the ranks of several nodes have agreed (see :mod:`.peers`). The training,
    the thread that copies, and the thread that talks to the other nodes use this object.

    Args:
        secured: the newest step of which every rank has a copy, also on another node if it must be there;
            ``None`` if there is none. Copies of this step stay.
    """

    def __init__(self, secured: int | None) -> None:
        self._changed = Condition()
        self.secured = self._copied = secured
        self._announced: int | None = None
        self._ended: int | None = None
        self._is_done = True
        self.is_closed = False

    def announce(self, step: int, secured: int | None) -> None:
        """Have the state copied when ``step`` ends. ``secured`` is the newest secured step by now."""
        with self._changed:
            self._announced, self.secured, self._copied = step, secured, None
            self._is_done = self._ended is not None and self._ended >= step

    def is_due(self, before: int, step: int) -> bool:
        """Return whether to copy the state at the end of ``step``, which follows ``before``."""
        with self._changed:
            self._ended = step
            is_due = not self._is_done and self._announced is not None and before < self._announced <= step
            if is_due:
                self._copied = step
            return is_due

    def protected(self) -> set[int | None]:
        """Return the steps whose copies this rank must not overwrite, because after the loss of a node one of
        them may be the only step of which all ranks have a copy.
        """
        with self._changed:
            return {self.secured, self._copied}

    def note_copy(self, step: int, *, is_kept: bool) -> None:
        """Note that a periodic copy has been made, or has failed."""
        with self._changed:
            if step == self._copied and not self._is_done:
                self._copied = step if is_kept else None
                self._is_done = True
                self._changed.notify_all()

    def wait(self) -> int | None:
        """Wait until this rank has ended the announced step. Return the step of its copy, which may be
        larger; ``None`` if it has made none.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_done or self.is_closed)
            return None if self.is_closed else self._copied

    def close(self) -> None:
        """Let :meth:`wait` return."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()


class Schedule:
    """Decides which steps are copied periodically, and reads in the files of all ranks what these have done.

    Args:
        words: words of the head of the file in which this rank keeps copies of its state.
        places: places of such files of all ranks, by rank; empty if some are on other nodes.
        rank: this rank.
        every: number of steps from one periodic copy to the next, as for :class:`.Keeper`.
        mode: a code of :class:`.Mode`: whether all ranks have the same state.
    """

    def __init__(
        self, words: memoryview, places: Sequence[str], rank: int, every: int | None, mode: int
    ) -> None:
        self._words, self._places, self._rank = words, places, rank
        self._every, self._mode = every, mode
        self._peers: list[KeepFile] | None = None
        self.generations: Generations | None = None
        """If the ranks of several nodes agree on the copies, what they have agreed on."""
        self.are_all_equal = False
        """True if the ranks of several nodes have found by their copies that all have the same state."""
        self._count = 0
        self._before: int | None = None
        self._stride = 1
        self._has_copied = False
        self._announced: int | None = None
        self._began_ns = monotonic_ns()
        self._blocked_ns = 0
        self.has_copies_at_failure = True
        """False if this rank makes only periodic copies, for example because its state is on a GPU."""

    def next(self, step: int, *, is_idle: bool) -> tuple[bool, bool]:
        """Return two values: whether to copy the state at the end of ``step``, and whether the ranks find out
        by this copy if all have the same state. ``is_idle`` is true if no periodic copy is being made.
        """
        before = step - 1 if self._before is None else self._before
        self._count, self._before, self._stride = self._count + 1, step, step - before
        if self._count == 1:
            self._began_ns = monotonic_ns()
        is_check = self._mode == Mode.AUTO and self._count == _CHECKED
        if self.generations is not None:
            return self.generations.is_due(before, step) or is_check, is_check
        if self._every is not None:
            is_due = self._every > 0 and step // self._every > before // self._every
        elif self._leader() is None:
            is_due = step // _FIXED > before // _FIXED
        else:
            is_due = self._is_announced(before, step, is_idle)
        # Never copy two steps in a row, because they would replace both older copies of this rank. If another
        # rank died while it copied the first of the two, no step would be left that both ranks have copied.
        is_before_check = self._mode == Mode.AUTO and self._count == _CHECKED - 1
        self._has_copied = is_check or (is_due and not self._has_copied and not is_before_check)
        return self._has_copied, is_check

    def _is_announced(self, before: int, step: int, is_idle: bool) -> bool:
        leader = self._leader()
        assert leader is not None
        is_due = before < leader[Head.NEXT] - 1 <= step
        # When rank 0 has ended a step after the announced one, all other ranks have ended the announced one.
        # So they have seen the announcement, and the next one may replace it.
        is_seen = self._announced is None or step > self._announced
        if self._rank == 0 and self._count >= _CHECKED and is_idle and is_seen:
            # Let the first announced copy be soon, to learn how long a copy blocks the training.
            interval = self._interval() if self._announced is not None else _FIRST_AHEAD
            self._announced = step + interval * (step - before)
            self._words[Head.NEXT] = self._announced + 1
        return is_due

    def protected(self) -> set[int | None] | None:
        """Return the steps whose copies this rank must not overwrite, if the ranks of several nodes agree on
        the copies, and do not have the same state. See :meth:`Generations.protected`.
        """
        return None if self.generations is None or self.are_all_equal else self.generations.protected()

    def upcoming(self, notice: float) -> int | None:
        """Return the step of the next copy that rank 0 announces to the ranks of several nodes; ``None`` if
        the program wants no periodic copies. Rank 0 calls this when the copy before is complete everywhere.
        All ranks need ``notice`` seconds to learn of it.
        """
        if self._before is None or self._every == 0:
            return None
        ahead = _AHEAD + ceil(notice * 1e9 / self._step_ns())
        first = self._before + ahead * self._stride
        if self._every is not None:
            return -(-first // self._every) * self._every
        self._announced = max(first, (self._announced or 0) + self._interval() * self._stride)
        return self._announced

    def _step_ns(self) -> int:
        return max(1, (monotonic_ns() - self._began_ns) // max(1, self._count - 1))

    def _interval(self) -> int:
        """Return the number of steps to the next copy, from how long the last one blocked the training."""
        step_ns = self._step_ns()
        blocked, self._blocked_ns = (
            self._words[Head.BLOCKED_NS] - self._blocked_ns,
            self._words[Head.BLOCKED_NS],
        )
        is_spare = self.has_copies_at_failure and self.is_replicated()
        least = _REPLICATED_NS / step_ns if is_spare else 0
        return max(_AHEAD, ceil(blocked / (_SHARE * step_ns)), ceil(least))

    def is_replicated(self) -> bool:
        """Return true if all ranks have the same state. Assume so until the first copies are compared."""
        if self._mode != Mode.AUTO or self.are_all_equal:
            return self._mode != Mode.SHARDED
        if not self._words[Head.CHECK_STEP]:
            return True
        checks = {(each[Head.CHECK_STEP], each[Head.CHECK_DIGEST]) for each in self._others()}
        return checks == {(self._words[Head.CHECK_STEP], self._words[Head.CHECK_DIGEST])}

    def declare_sharded(self, twins: tuple[int, int, int] | None) -> None:
        """Note, also in this rank's file, that the rank has only a part of the state, and which ranks have
        the same part (see :func:`.trees.twins_of`).
        """
        self._mode = self._words[Head.MODE] = Mode.SHARDED
        for number, word in enumerate(twins or (0, 0, 0)):
            self._words[Head.TWINS + number] = word

    def have_all_copied(self, step: int) -> bool | None:
        """Return whether each rank has a complete copy of ``step``; ``None`` if the files cannot be read."""
        self._others()
        try:
            return all(each.has_copy(step) for each in self._peers) if self._peers else None
        except (OSError, OffError):
            return None  # The agent has ended, and the files were in its memory.

    def newest_ended(self) -> int:
        """Return the newest step that any of the ranks has ended; -1 if there is none."""
        return max((each[Head.ENDED] for each in self._others()), default=0) - 1

    def do_starts_differ(self) -> bool:
        """Return true if another rank has not restored the same step as this rank, or has not done so yet."""
        own = self._words[Head.RESTORED]
        return any(each[Head.PID] and each[Head.RESTORED] != own for each in self._others())

    def ranks_from_elsewhere(self) -> tuple[list[int], bool]:
        """Return the ranks that have restored another step than this rank. Also return whether the list is
        complete, because each rank has ended a step since it restored its state.
        """
        own, heads = self._words[Head.RESTORED], self._others()
        ended = [rank for rank, each in enumerate(heads) if each[Head.ENDED]]
        return [rank for rank in ended if heads[rank][Head.RESTORED] != own], len(ended) == len(heads)

    def close(self) -> None:
        """Remove the mappings of all ranks' files from the memory of this process."""
        for each in self._peers or ():
            each.close()
        self._peers = []

    def _leader(self) -> memoryview | None:
        heads = self._others()
        return heads[0] if heads else None

    def _others(self) -> list[memoryview]:
        """Return the heads (with the progress) of the files of all ranks; nothing if they cannot be read."""
        if self._peers is None:
            try:
                self._peers = [KeepFile(place) for place in self._places]
            except OffError:
                self._peers = []
        return [each.words for each in self._peers]
