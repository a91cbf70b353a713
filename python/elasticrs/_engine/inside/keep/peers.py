"""Lets the ranks of several nodes tell each other which periodic copies of their states they have.

All ranks make their periodic copies at the same steps. The copies of all ranks of one step are a
*generation*. The ranks compare the copies of each generation through the store (of keys and values) through
which their process groups connect.

- **PEERS-1** Rank 0 announces the step of the next copy when the copies of the last step have been compared.
  At the end of the announced step, each rank copies its state into its own file, and writes the step and the
  checksum of the copy into the store.
- **PEERS-2** With ``--keep-peers``, each node then downloads the copies of the ranks of one other node (its
  source), except for copies of which any other node has an equal one. So sharded state (of which each node
  has only a part) can be restored after the loss of a node. A downloaded copy replaces an older one, but
  never one of the newest secured generation.
- **PEERS-3** When all ranks have copied the step, and all downloads are complete, the generation is
  *secured*: its step can be restored as long as all nodes are there, and with ``--keep-peers`` also after the
  loss of any one of them. If a rank has made no copy, or a download has failed, the generation before
  remains the secured one. A rank does not overwrite copies of the newest secured generation. No rank
  concludes from its own steps that a generation is secured, because another rank may have made no copy.
- **PEERS-4** If the download of a rank's copies fails three times in a row, or a copy is too large, the rank
  that downloads them gives up. Later generations then count as secured without these downloads, but the agent
  does not say so. An error in this module never fails the training.
- **PEERS-5** A rank that makes no copies any more, or cannot compare them, says so in the store, with the
  reason. Each node tells the user. The copies of the other ranks end if this is rank 0, which announces them,
  or if each rank has only a part of the state.
- **PEERS-6** A rank may also be unable to say anything, for example because its program does not use Keep.
  Then no further copies are made, and each node tells the user what the ranks wait for.
"""

from __future__ import annotations

import os
import threading
from time import monotonic

from elasticrs._engine.inside.handover import MIN_RATE, without_signals
from elasticrs._engine.inside.keep import layout
from elasticrs._engine.inside.keep.file import KeepFile, OffError, say
from elasticrs._engine.inside.keep.layout import Agreed, AgreedState, Head, Slot, SlotState
from elasticrs._engine.inside.keep.nodes import is_intact, leave, offer_of, take_paced
from elasticrs._engine.job import phrases

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from elasticrs._engine.inside.keep.nodes import Agreement, Store
    from elasticrs._engine.inside.keep.schedule import Schedule

_FIRST_DELAY = 0.01
"""Seconds between the first two times that a rank looks for what other ranks have written into the store."""

_LONGEST_DELAY = 0.05
"""Maximum seconds between two looks into the store with up to 500 ranks; in proportion with more ranks."""

_LONGEST_NOTICE = 5.0
"""Maximum seconds from rank 0's announcement of a copy to the step at whose end the copy is made."""

_END_LIMIT = 1.0
"""Maximum seconds for which the end of the program waits for the thread of :class:`Peers`."""

_LATE = 60.0
"""Seconds for which a rank waits for what other ranks write into the store, until it tells the user."""

_ALL_COPIED = "all ranks have said whether they have copied the last step to copy"
"""What the ranks wait for after each copy, in a line for the user."""

_MOST_TEXT = 300
"""Maximum length of a reason that a rank writes into the store or tells the user."""

_QUIET = 10.0
"""Seconds from an error in the thread, such as the loss of the store, to the line about it for the user."""

_MOST_FAILURES = 3
"""Number of failed downloads in a row after which a rank gives up downloading another rank's copies."""


class _ClosedError(Exception):
    """Raised to end the thread of :class:`Peers`, because the program ended or stopped keeping its state."""


def sources(count: int) -> list[int]:
    """Return, for each of ``count`` nodes, its source: the number of the node whose copies it downloads. Two
    nodes of a pair are each other's source. If ``count`` is odd, three nodes form a triple. If there is only
    one node, it is its own source.

    Pairs are better than a ring, because two lost nodes are rarely of the same pair. The numbers of a pair
    differ by half of ``count``, because nodes with neighbouring numbers often fail together.
    """
    half = count // 2
    found = [(node + half) % (2 * half) for node in range(2 * half)]
    if count % 2:
        # The last node joins the pair of node 0. Each of these three nodes downloads the copies of the next.
        last = count - 1
        found.append(0)
        if half:
            found[half] = last
    return found


def without_second_copy(copies: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks whose copies would be lost with their node, because no rank of another node has an
    equal copy.

    Args:
        copies: for each rank, what identifies the content of its copy: step, checksum and layout.
        nodes: for each node, its first rank and its number of ranks.
    """
    holders: dict[tuple[int, ...], set[int]] = {}
    for node, (first, count) in enumerate(nodes):
        for rank in range(first, first + count):
            holders.setdefault(tuple(copies[rank]), set()).add(node)
    return [rank for rank, copy in enumerate(copies) if len(holders[tuple(copy)]) == 1]


def _are_ranks(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


def _are_reasons(value: object) -> bool:
    """Return true if a value from the store is a dictionary that maps ranks to reasons (texts)."""
    return isinstance(value, dict) and all(
        each.isdecimal() and isinstance(reason, str) for each, reason in value.items()
    )


class Peers:
    """A thread of a worker that compares this rank's periodic copies with those of the other ranks.

    Args:
        agreement: what the nodes have agreed on, such as the step that all ranks restore, and the store (of
            keys and values) through which they have agreed.
        file: the file in memory in which this rank keeps copies of its own state.
        schedule: says when this rank copies its state.
        has_partners: true if nodes may keep copies of each other's states, as ``--keep-peers`` says.
    """

    def __init__(
        self,
        agreement: Agreement,
        file: KeepFile,
        schedule: Schedule,
        *,
        has_partners: bool = True,
    ) -> None:
        assert agreement.store is not None
        self._agreement, self._store, self._own = agreement, agreement.store, file
        self._rank, self._world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._schedule = schedule
        self._closed, self._has_ended = threading.Event(), threading.Event()
        self._nodes = nodes = agreement.nodes if has_partners else None
        self.has_partners = nodes is not None
        """True if nodes keep copies of each other's states."""
        self._partner: Partner | None = None
        """Downloads the copies of a rank of another node; ``None`` without ``--keep-peers``."""
        if nodes is not None:
            try:
                self._partner = Partner(agreement.plan, nodes, file, self._store, self._closed)
            except OffError as error:
                say(f"no copies of another node are kept here, so its state is lost with it: {error}")
        self._generations = schedule.begin_generations(agreement.plan["step"])
        self._downloads = 0
        """How many times the ranks have downloaded copies."""
        self._missing = (0, 0)
        """How many of all downloads have failed, and how many copies the nodes that need them did not get."""
        self._longest_delay = _LONGEST_DELAY * max(1, self._world / 500)
        self._notice = 2 * self._longest_delay
        self._is_running = self._has_published = False
        self._off: dict[str, str] = {}
        """Why ranks make no copies any more, by rank. Only rank 0 collects these reasons."""
        self._told_off: dict[str, str] = {}
        """The value of ``_off`` of which this rank has told the user."""

    def begin(self) -> None:
        """Start the thread that compares copies, unless it has been started. Call this after the first
        training step, or when this rank makes no copies any more.
        """
        if self._is_running:
            return
        self._agreement.is_restored = self._is_running = self._generations.are_compared = True
        with without_signals():
            threading.Thread(target=self._run, name="elasticrs-peers", daemon=True).start()

    def close(self) -> None:
        """Tell the thread to end, and wait for its end, but at most :data:`_END_LIMIT` seconds."""
        self._closed.set()
        self._generations.close()
        if self._is_running:
            self._has_ended.wait(_END_LIMIT)

    def _run(self) -> None:
        number = -1
        try:
            while True:
                number, step = self._generations.wait(number)
                is_whole, senders, are_equal = self._compare(number, step)
                if is_whole:
                    self._schedule.note_equal(are_equal)
                is_secured = are_held = is_whole
                if is_whole and senders:
                    is_secured, are_held = self._download(number, step, senders)
                if self.has_partners and are_held and step is not None:
                    # Write this first, because the process may be stopped as soon as the step is settled.
                    self._own.words[Head.SECURED] = step + 1
                self._generations.settle(step, is_secured=is_secured)
                if not self._announce(number, is_whole=is_whole):
                    return
        except _ClosedError:
            return
        # An error in this thread, for example of the store, must not end the training.
        except Exception as error:
            self._fail(error)
        finally:
            self._generations.end_comparing()
            self._has_ended.set()

    def _fail(self, error: Exception) -> None:
        """Tell the other ranks and the user that this rank can no longer compare its copies."""
        self._generations.end_comparing()
        reason = f"it cannot compare its copies with those of the other ranks: {error!r}"[:_MOST_TEXT]
        try:
            leave(self._store, self._rank, self._world, reason, has_published=self._has_published)
        # The store may be lost. In this case, the other ranks tell the user that they are waiting.
        except Exception as another:
            reason += f" (the other nodes cannot be told: {another!r})"[:_MOST_TEXT]
        # The store may be lost with its node. Then the agent stops this process, and no line is needed.
        if not self._closed.wait(_QUIET):
            say(f"this rank makes no more periodic copies, because {reason}")

    def _announce(self, number: int, *, is_whole: bool) -> bool:
        """Agree with all ranks on the next step to copy. Rank 0 chooses it. Return false if no further step
        is to be copied.
        """
        if self._rank == 0:
            for _ in self._looks():
                if self._schedule.knows_pace() or self._generations.off or self._is_node_leaving():
                    break
            if not is_whole and not self._off and number != self._agreement.plan["step"]:
                # A rank has no copy, because it learned of the step too late. So announce the steps earlier.
                self._notice = min(_LONGEST_NOTICE, 2 * self._notice)
            if self._generations.off:
                self._off = {"0": self._generations.off[:_MOST_TEXT], **self._off}
            is_last = "0" in self._off or (bool(self._off) and self._schedule.is_sharded())
            step = None if is_last else self._schedule.upcoming(self._notice)
            self._store.set("next", [number, [step, self._off]])
        announced, off = self._await("next", number, "rank 0 has said which step is copied next")
        # The training thread uses this value, and an error there would turn Keep off.
        if not (announced is None or type(announced) is int) or not _are_reasons(off):
            raise TypeError(f"the key 'next' in the store has the value {[announced, off]!r}")
        self._tell_off(off, is_last=announced is None)
        if announced is not None:
            self._generations.announce(announced)
        return announced is not None

    def _is_node_leaving(self) -> bool:
        return self._own.words[Agreed.NODE_LEAVES] != 0 and self._own.words[Agreed.STATE] != AgreedState.NONE

    def _tell_off(self, off: dict[str, str], *, is_last: bool) -> None:
        """Tell the user once which ranks make no more copies, the reason, and the consequences."""
        if off and off.keys() != self._told_off.keys():
            ranks, verb = phrases.ranks_text(sorted(map(int, off)), 4), "makes" if len(off) == 1 else "make"
            follows = "the other ranks go on, but can be restored only if all ranks have the same state"
            if is_last:
                secured = self._generations.secured
                newest = "" if secured is None else f"; the last step that all ranks have copied is {secured}"
                follows = f"the periodic copies of all ranks end{newest}"
            rank, reason = min(off.items(), key=lambda each: int(each[0]))
            why = reason if len(off) == 1 else f"of rank {rank}: {reason}"
            say(f"{ranks} {verb} no copies any more ({why}): {follows}")
        self._told_off = off

    def _compare(self, number: int, step: int | None) -> tuple[bool, list[int], bool]:
        """Tell the other ranks the step and the checksum of this rank's copy for the generation ``number``,
        and wait until all ranks have done so. Return three values: whether all ranks have a copy of the same
        step, the ranks whose copies another node must download, and whether all copies are equal.
        """
        if self._closed.is_set():
            raise _ClosedError
        copy = self._generations.off[:_MOST_TEXT] or self._copy_of(step)
        self._store.set(f"copied/{self._rank}", [number, copy])
        if not self._has_published:
            self._has_published = True
            self._store.add("published", 1)
        if self._rank == 0:
            for _ in self._looks(_ALL_COPIED):
                if self._store.add("published", 0) < self._world:
                    continue
                found = self._store.get_all([f"copied/{rank}" for rank in range(self._world)])
                # Do not wait for a rank that makes no more copies.
                if all(each[0] == number or isinstance(each[1], str) for each in found):
                    break
            self._off = {f"{rank}": copy for rank, (_, copy) in enumerate(found) if isinstance(copy, str)}
            copies = [None if isinstance(copy, str) else copy for _, copy in found]
            self._store.set("compared", [number, self._compared(copies)])
        compared = is_whole, senders, are_equal = self._await("compared", number, _ALL_COPIED)
        if not (type(is_whole) is type(are_equal) is bool and _are_ranks(senders)):
            raise TypeError(f"the key 'compared' in the store has the value {compared!r}")
        return is_whole, senders, are_equal

    def _compared(self, copies: Sequence[Sequence[int] | None]) -> tuple[bool, list[int], bool]:
        """Compare steps and checksums of all ranks' copies. Return the three values of :meth:`_compare`."""
        there = [copy for copy in copies if copy is not None]
        if len(there) < len(copies) or len({copy[0] for copy in there}) > 1:
            return False, [], False
        senders = [] if self._nodes is None else without_second_copy(there, self._nodes)
        return True, senders, len(set(map(tuple, there))) == 1

    def _copy_of(self, step: int | None) -> list[int] | None:
        """Return step, checksum and layout of this rank's copy of ``step``; ``None`` without this copy."""
        for slot in self._own.slots:
            if step is not None and slot.complete_step == step and slot.words is not None:
                return [step, slot.words[Slot.DIGEST], slot.words[Slot.LAYOUT]]
        return None

    def _download(self, number: int, step: int | None, senders: Sequence[int]) -> tuple[bool, bool]:
        """Download the copy of ``step`` that a rank of another node has made, if this node needs it. Then
        wait until all ranks have completed their downloads. Return two values: whether no download has
        failed, and whether another node has the copy of each of the ``senders``. The second is false also if
        a node no longer downloads copies (PEERS-4).
        """
        partner = self._partner
        if step is not None and partner is not None and partner.rank in senders:
            partner.take(step, self._generations.secured)
        if partner is None or (partner.rank in senders and not partner.has(step)):
            self._store.add("absent", 1)
        self._downloads += 1
        self._store.add("taken", 1)
        if self._rank == 0:
            for _ in self._looks():
                if self._store.add("taken", 0) >= self._world * self._downloads:
                    break
            before, now = self._missing, (self._store.add("failed", 0), self._store.add("absent", 0))
            self._missing = now
            self._store.set("done", [number, [before[0] == now[0], before[1] == now[1]]])
        no_failure, are_held = self._await("done", number)
        return bool(no_failure), bool(are_held)

    def _await(self, key: str, number: int, waits_for: str | None = None) -> Any:
        """Wait until rank 0 has written a value for the generation ``number`` under a key of the store, and
        return the value.
        """
        for _ in self._looks(waits_for):
            # Also accept the answer for a later generation: if this rank makes no more copies, rank 0 may
            # have gone on without it.
            if self._store.has(key) and (found := self._store.get(key))[0] >= number:
                return found[1]
        raise AssertionError

    def _looks(self, waits_for: str | None = None) -> Iterator[None]:
        """Yield each time the caller should poll the store: immediately, and then after increasing pauses.
        After :data:`_LATE` seconds of training, tell the user what this rank ``waits_for``.
        """
        delay, late_at = _FIRST_DELAY, None
        while True:
            yield
            if self._closed.wait(delay):
                raise _ClosedError
            delay = min(self._longest_delay, delay * 1.5)
            if waits_for is not None and self._schedule.knows_pace():
                late_at = late_at or monotonic() + _LATE
                if monotonic() > late_at:
                    say(f"no more periodic copies are made until {waits_for} ({_LATE:.0f} s so far)")
                    waits_for = None


class Partner:
    """Downloads the copies that a rank of another node has made of its state into a file in the memory of
    this node's agent. That rank is called the *other rank*. It has the same local rank as this one.

    Args:
        plan: what the agent tells this worker, such as the place of the file for the downloads.
        nodes: for each node, its first rank and its number of ranks, which is the same for all nodes.
        own: the file with this rank's own copies.
        store: the store in which the other rank has published the address of its server.
        closed: is set when the program ends.

    Raises:
        OffError: the file for the downloads cannot be opened.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        nodes: Sequence[Sequence[int]],
        own: KeepFile,
        store: Store,
        closed: threading.Event,
    ) -> None:
        self._own, self._store, self._closed = own, store, closed
        self._memory: int = plan["memory"]
        # The minimum rate of a download. A slower one is aborted, because other nodes wait for it. A low
        # --keep-bandwidth lowers the minimum.
        self._least_rate = min(MIN_RATE, plan["bandwidth"] / 2) if plan["bandwidth"] else MIN_RATE
        self._world, self._local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
        self._theirs = KeepFile(plan["partner_files"][self._local_rank])
        self._source = sources(len(nodes))[int(os.environ["GROUP_RANK"])]
        self.rank = nodes[self._source][0] + self._local_rank
        """The rank of another node whose copies this object downloads."""
        self._failures = 0
        """Number of failed downloads in a row."""

    def take(self, step: int, secured: int | None) -> None:
        """Download the other rank's copy of ``step``, unless this node has it. Do not overwrite its copy of
        the step ``secured``, which all ranks can restore. Tell the user if the download fails.
        """
        if self._failures == _MOST_FAILURES or self.has(step):
            return
        try:
            self._download(step, secured)
            self._failures = 0
        except (OSError, OffError) as error:
            # When the training ends, this fails if the other rank ended first. Then this process ends soon.
            if self._closed.wait(_END_LIMIT):
                raise _ClosedError from error
            # If this copy is too large for the memory, later ones will be, too. So do not try again.
            self._failures = _MOST_FAILURES if isinstance(error, OffError) else self._failures + 1
            follows = "its state is not kept here any more, so a loss of that node loses it"
            if self._failures < _MOST_FAILURES:
                self._store.add("failed", 1)
                follows = "the copy before is kept here, and the next one is tried"
            say(
                f"rank {self.rank}'s copy of step {step} cannot be downloaded from its node"
                f" {self._source}: {error}; {follows}"
            )

    def has(self, step: int | None) -> bool:
        """Return true if this node has the other rank's copy of ``step``."""
        return bool(self._theirs_of(step))

    def _theirs_of(self, step: int | None) -> list[int]:
        """Return the numbers of the slots (regions of a file) that have the other rank's copy of a step."""
        expected = SlotState.COMPLETE, step, self.rank, self._world
        words = (Slot.STATE, Slot.STEP, Slot.RANK, Slot.WORLD)
        heads = ((number, slot.words) for number, slot in enumerate(self._theirs.slots))
        return [
            number
            for number, head in heads
            if head is not None and tuple(head[word] for word in words) == expected
        ]

    def _download(self, step: int, secured: int | None) -> None:
        offer = offer_of(self._store.get(f"offer/{self._source}/{self._local_rank}"))
        room = self._memory - layout.SLOTS * max(slot.capacity for slot in self._own.slots)
        kept = self._theirs_of(secured)
        number = take_paced(offer, step, self._theirs, room // layout.SLOTS, kept, self._least_rate)
        slot = self._theirs.slots[number]
        if number not in self._theirs_of(step) or not is_intact(slot):
            slot.drop()
            raise ConnectionError("its checksum is wrong")
