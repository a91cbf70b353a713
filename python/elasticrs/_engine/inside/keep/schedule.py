"""Decides at the end of which training steps the ranks copy their states periodically.

All ranks must copy the same steps, because a step cannot be restored if one rank lacks its part of the state.
They cannot ask each other without delaying the training. Therefore, rank 0 announces each copy some steps
ahead, in its file (memory that the other ranks on the node can read).
"""

from __future__ import annotations

from math import ceil
from threading import Condition
from time import monotonic, monotonic_ns, sleep
from typing import NamedTuple

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

_PAUSE = 0.01
"""Seconds between two looks into the other ranks' files, to see whether these ranks have restored a step."""

_EQUAL = 2
"""All ranks count as having the same state after they had equal copies of this number of steps in a row."""

_REPLICATED_NS = 60_000_000_000
"""Minimum nanoseconds between two periodic copies if all ranks have the same state. Few are needed then,
because any rank that survives a failure can still copy the newest state.
"""

_FIXED = 10
"""Number of steps between two periodic copies if this rank cannot read in rank 0's file when to make them."""


def slots_to_use(held: Sequence[int | None], older: int | None) -> list[int]:
    """Return the slots (places for one copy each) of a rank's file in the order in which the next copy should
    use them: an empty one, then the one with the oldest step.

    Args:
        held: the step of the copy in each slot; ``None`` for an empty slot.
        older: step of a copy to which the training may have to go back (LOOP-1), because the restored one may
            be bad. Its slot comes last.
    """

    def key(slot: int) -> tuple[bool, int]:
        step = held[slot]
        return step is not None and step == older, -1 if step is None else step

    return sorted(range(len(held)), key=key)


class Held(NamedTuple):
    """What other ranks see in the file of a rank."""

    steps: set[int]
    """Steps of which the rank has a complete copy."""
    given_up: int
    """Step of the copy that the rank is about to overwrite, if it finds that the copy can be spared; -1 if
    there is none.
    """
    restored: int
    """Step that the rank has restored; -1 if there is none. It keeps its random numbers of that step until
    the next restart.
    """


def can_spare(step: int, held: Sequence[Held], *, is_replicated: bool) -> bool:
    """Return true if a rank may overwrite its copy of ``step``. It may if all ranks can restore another step
    exactly, even if their next copies fail. It also may if they could not restore ``step`` anyway.

    Each rank gives its copy up before it looks. So of two ranks that do this at the same time, at least one
    sees that the other has done so.

    Args:
        step: step of the copy. The rank has given it up.
        held: what each rank has.
        is_replicated: true if any rank's copy serves all ranks, with the random numbers of each.
    """

    def can_restore(wanted: int, steps: Sequence[set[int]]) -> bool:
        return any(wanted in each for each in steps) and all(
            wanted in each or (is_replicated and wanted == rank.restored)
            for each, rank in zip(steps, held, strict=True)
        )

    whole = [rank.steps for rank in held]
    safe = [rank.steps - {rank.given_up} for rank in held]
    return any(can_restore(each, safe) for each in set().union(*safe)) or not can_restore(step, whole)


class Generations:
    """The periodic copies of the training state that the ranks of several nodes make at the same steps. The
    copies of all ranks of one step are a *generation*. It is *secured* when this rank knows that its step can
    be restored, because each rank has its copy, and with ``--keep-peers``, another node has a second one.
    Three threads use this object: the one that trains, the one that copies the state, and the one of
    :class:`.Peers`, which talks to the other nodes.

    Args:
        secured: the newest step of which every rank has a copy; ``None`` if there is none.
    """

    def __init__(self, secured: int | None) -> None:
        self._changed = Condition()
        self.secured = self._copied = secured
        self._announced: int | None = None
        self._number = self._finished = -1 if secured is None else secured
        self._ended: int | None = None
        self.are_compared = False
        """True while the ranks tell each other which copies they have."""
        self.is_closed = False
        self.off = ""
        """Why this rank makes no copies of its state any more; empty as long as it makes copies."""

    def announce(self, step: int) -> None:
        """Record that rank 0 has announced a copy of the state at the end of ``step``. If this rank has ended
        that step already, note that it has no copy of it.
        """
        with self._changed:
            self._announced = step
            if self.off or (self._ended is not None and self._ended >= step):
                self._copied = None
                self._finish(step)

    def turn_off(self, reason: str) -> None:
        """Record that this rank no longer makes copies, so that the other ranks do not wait for its next
        copy.
        """
        with self._changed:
            self.off = reason
            newest = max(self._number, self._announced or 0)
            if self._finished < newest:
                self._copied = None
                self._finish(newest)

    def end_step(self, step: int) -> None:
        """Record that this rank has ended a step."""
        with self._changed:
            self._ended = step

    def is_due(self, before: int, step: int) -> bool:
        """Return whether to copy the state at the end of ``step``. That is so if rank 0 has announced a copy
        of a step after ``before``, up to this one: programs may skip steps.
        """
        with self._changed:
            number = self._announced
            if number is None or not before < number <= step or self._finished >= number:
                return False
            self.begin_copy(step, number)
            return True

    def begin_copy(self, step: int, number: int) -> None:
        """Record that this rank is about to copy its state at the end of ``step``. ``number`` is the number
        of the generation (the copies of all ranks of one step), and is larger than that of any earlier one.
        """
        with self._changed:
            self._copied, self._number = step, number

    def begin_last(self, step: int, limit: float) -> None:
        """Begin a generation with the copies of ``step``, because a node is leaving the job. All ranks stand
        at this step. First wait at most ``limit`` seconds until the previous generation is settled.
        """
        self.await_settled(limit)
        with self._changed:
            if self._number < step and not self.off:
                self._copied = self._number = step

    def begin_first(self, step: int | None) -> None:
        """Begin the first generation, number 0, unless all ranks have restored a step. It has the copies of
        ``step`` by which the ranks find out if they have the same state; ``None`` without such a copy.
        """
        with self._changed:
            if self._number < 0:
                self._copied, self._number = step, 0
                if step is None:
                    self._finish(0)

    def protected(self) -> set[int | None]:
        """Return the steps whose copies this rank must not overwrite, because one of them may be the only
        step of which all ranks have a copy.
        """
        with self._changed:
            return {self.secured, self._copied}

    def note_copy(self, step: int, *, is_kept: bool) -> None:
        """Record that a periodic copy has been made, or has failed."""
        with self._changed:
            if step == self._copied and self._finished < self._number:
                self._copied = step if is_kept else None
                self._finish(self._number)

    def _finish(self, number: int) -> None:
        self._number = self._finished = number
        self._changed.notify_all()

    def wait(self, seen: int | None) -> tuple[int, int | None]:
        """Wait until this rank has made, or failed to make, a copy for a generation (the copies of all ranks
        of one step) after number ``seen``. Return the number of the new generation, and the step of the copy.
        The step is ``None`` if the copy has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._finished != seen or self.is_closed)
            return self._finished, None if self.is_closed else self._copied

    def settle(self, step: int | None, *, is_secured: bool) -> None:
        """Record whether all ranks can restore ``step``. If not, this rank may overwrite its copy of it."""
        with self._changed:
            if step is not None and step == self._copied:
                self.secured, self._copied = (step, step) if is_secured else (self.secured, None)
                self._changed.notify_all()

    def await_settled(self, limit: float) -> None:
        """Wait until it is known whether the newest generation is secured, but at most ``limit`` seconds. Do
        not wait if the ranks do not compare their copies any more.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._copied in (None, self.secured) or not self.are_compared, limit
            )

    def end_comparing(self) -> None:
        """Record that the ranks do not tell each other any more which copies they have."""
        with self._changed:
            self.are_compared = False
            self._changed.notify_all()

    def close(self) -> None:
        """Let :meth:`wait` return."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()


class Schedule:
    """Decides at the end of which steps this rank copies its state periodically, and reads in the files of
    all ranks how far the ranks have come.

    Args:
        words: the numbers at the start of the file in memory in which this rank keeps copies of its state.
        places: the places of the files of this node's ranks.
        rank: this rank.
        every: number of steps from one periodic copy to the next, as for :class:`.Keeper`.
        mode: a code of :class:`.Mode`: whether all ranks have the same state.
        has_other_nodes: true if the job may have several nodes. This rank cannot read the other nodes' files.
    """

    def __init__(
        self,
        words: memoryview,
        places: Sequence[str],
        rank: int,
        every: int | None,
        mode: int,
        *,
        has_other_nodes: bool = False,
    ) -> None:
        self._words, self._places, self._rank = words, places, rank
        self._has_other_nodes = has_other_nodes
        self._every, self._mode = every, mode
        self._peers: list[KeepFile] | None = None
        self.generations: Generations | None = None
        """The periodic copies that the ranks of several nodes compare; ``None`` if they compare none."""
        self._equal_copies = 0
        """Number of the latest steps in a row of which all ranks, on several nodes, had equal copies."""
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
            self.generations.end_step(step)
            if self._count == _CHECKED:
                self.generations.begin_first(step if is_check else None)
                self._announced = step if is_check else None
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

    def begin_generations(self, secured: int | None) -> Generations:
        """Return the object by which the ranks of several nodes agree on the steps of their periodic copies.
        ``secured`` is the step that all ranks restore; ``None`` if there is none.
        """
        self.generations = made = Generations(secured)
        self._equal_copies = _EQUAL * self._words[Head.WAS_REPLICATED]
        return made

    def turn_off(self, reason: str) -> None:
        """Record that this rank no longer makes copies, so that ranks of other nodes do not wait for one."""
        if self.generations is not None:
            self.generations.turn_off(reason)

    def note_equal(self, are_equal: bool) -> None:
        """Record whether all ranks, on several nodes, had equal copies of a step. Also write into this rank's
        file whether all ranks count as having the same state. The agent could not find that out after the
        loss of a node, because that node's copies would be lost, too.
        """
        self._equal_copies = self._equal_copies + 1 if are_equal else 0
        self._words[Head.WAS_REPLICATED] = int(self.is_replicated())

    def protected(self) -> set[int | None] | None:
        """Return the steps whose copies this rank must not overwrite (see :meth:`Generations.protected`).
        Return ``None`` if it may overwrite all, because all ranks are on one node or have the same state.
        """
        if self.generations is None or self.is_replicated():
            return None
        return self.generations.protected()

    def await_settled(self, limit: float) -> None:
        """Wait until it is known whether all ranks can restore their newest copies; see :meth:`protected`."""
        if self.generations is not None:
            self.generations.await_settled(limit)

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
        step = max(first, (self._announced or 0) + self._interval() * self._stride)
        # Two copies in a row must be an odd number of steps apart (see `_FIRST_AHEAD`). Add a step if not.
        is_even = self._announced is not None and (step - self._announced) // self._stride % 2 == 0
        self._announced = step + is_even * self._stride
        return self._announced

    def knows_pace(self) -> bool:
        """Return true if enough steps have ended to know how long a step takes."""
        return self._count > _CHECKED

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
        """Return true if all ranks have the same state. As long as no copies of all ranks have been compared,
        assume that they have if they are on one node, and that they have not if they are on several nodes.
        """
        if self._mode != Mode.AUTO or self._equal_copies >= _EQUAL:
            return self._mode != Mode.SHARDED
        if self.generations is not None:
            return False
        own = self._words[Head.CHECK_STEP]
        if not own:
            return True
        # A rank that restored its state earlier than this rank could not make the copy, so do not wait for
        # it.
        heads = [each for each in self._others() if each[Head.CHECK_STEP] or each[Head.ENDED] <= own]
        checks = {(each[Head.CHECK_STEP], each[Head.CHECK_DIGEST]) for each in heads}
        return checks == {(own, self._words[Head.CHECK_DIGEST])}

    def is_sharded(self) -> bool:
        """Return true if it is known that each rank has only a part of the state."""
        return self._mode == Mode.SHARDED

    def declare_sharded(self, twins: tuple[int, int, int] | None) -> None:
        """Note, also in this rank's file, that the rank has only a part of the state, and which ranks have
        the same part (see :func:`.trees.twins_of`).
        """
        self._mode = self._words[Head.MODE] = Mode.SHARDED
        for number, word in enumerate(twins or (0, 0, 0)):
            self._words[Head.TWINS + number] = word

    def can_spare(self, step: int) -> bool | None:
        """Return true if this rank may overwrite its copy of ``step`` (see :func:`can_spare`). It must have
        given up that copy before. Return ``None`` if the files of the ranks cannot be read.
        """
        held = self._held()
        return can_spare(step, held, is_replicated=self.is_replicated()) if held else None

    def _held(self) -> list[Held]:
        """Return the copies that each rank has. Return nothing if the files of the ranks cannot be read. If
        all ranks have the same state, leave out the ranks that no longer make copies: with them, all ranks
        would eventually go back to the last step that they copied.
        """
        if not self._others():
            return []
        files, is_replicated = self._peers or (), self.is_replicated()
        try:
            return [
                Held(each.copied_steps(), each.words[Head.GIVEN_UP] - 1, each.words[Head.RESTORED] - 1)
                for each in files
                if not (is_replicated and each.words[Head.REASON_LENGTH])
            ]
        except (OSError, OffError):
            return []  # The copies were in files in the memory of the agent, which has ended.

    def newest_ended(self) -> int:
        """Return the newest step that any of the ranks has ended; -1 if there is none."""
        return max((each[Head.ENDED] for each in self._others()), default=0) - 1

    def do_starts_differ(self) -> bool:
        """Return true if another rank of this node has not restored the same step as this rank, or has not
        done so yet. If this rank has restored nothing, ignore ranks that do not use ``Keep`` yet.
        """
        own = self._words[Head.RESTORED]
        return any((own or each[Head.PID]) and each[Head.RESTORED] != own for each in self._neighbours())

    def has_another_restored(self, limit: float) -> bool:
        """Wait until another rank of this node has restored a step, or all of them have failed to do so, but
        at most ``limit`` seconds. Return true if one has restored a step.
        """
        give_up_at, others = monotonic() + limit, self._others()
        while not (has_restored := any(each[Head.RESTORED] for each in others)):
            if all(each[Head.REFUSED] for each in others) or monotonic() > give_up_at:
                break
            sleep(_PAUSE)
        return has_restored

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
        return [] if self._has_other_nodes else self._neighbours()

    def _neighbours(self) -> list[memoryview]:
        """Return the heads of the files of this node's ranks; nothing if they cannot be read."""
        if self._peers is None:
            try:
                self._peers = [KeepFile(place) for place in self._places]
            except OffError:
                self._peers = []
        return [each.words for each in self._peers]
