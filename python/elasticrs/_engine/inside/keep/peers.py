"""Keeps a second copy of each state that only one node holds, in the memory of a partner node.

Without it, sharded state cannot be restored after the loss of a node (``--keep-peers``). The ranks of all
nodes agree on each periodic copy (a *generation*) through the store in which their process groups meet.

- **PEERS-1** Rank 0 announces a step ahead. All ranks copy their state at its end into their own files.
- **PEERS-2** When all have done so, each node takes the copies of its source's ranks, except for those of
  which another node has an equal copy. It replaces an older generation, not the newest one that is secured.
- **PEERS-3** When this is done on all nodes, the generation is secured, and rank 0 announces the next one. If
  a rank has made no copy, or a copy could not be taken, the generation before stays the secured one. So at
  any time, the ranks and the partners of lost nodes have a common generation.
- **PEERS-4** A rank whose transfers fail three times in a row, or whose copies are too large, is no longer
  waited for. Errors never fail the training.
"""

from __future__ import annotations

import os
import threading

from elasticrs._engine.inside.handover import MIN_RATE, without_signals
from elasticrs._engine.inside.keep import layout
from elasticrs._engine.inside.keep.file import KeepFile, OffError
from elasticrs._engine.inside.keep.layout import Head, Slot, SlotState
from elasticrs._engine.inside.keep.nodes import is_intact, offer_of, take_paced
from elasticrs._engine.inside.keep.schedule import Generations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from elasticrs._engine.inside.keep.nodes import Agreement, Store
    from elasticrs._engine.inside.keep.schedule import Schedule

_FIRST_DELAY = 0.01
"""Seconds between the first two looks at what other ranks have written into the store."""

_LONGEST_DELAY = 0.05
"""Longest of these seconds with up to 500 ranks; for more, in proportion, to spare the store."""

_LONGEST_NOTICE = 5.0
"""Maximum seconds from the announcement of a copy to its step."""

_END_LIMIT = 1.0
"""Maximum seconds for which the end of the program waits for the thread of this module."""

_QUIET = 10.0
"""Seconds from the failure of the store to the line that tells the user about it."""

_MOST_FAILURES = 3
"""Number of failed transfers in a row after which the other ranks no longer wait for this node's copies."""


class _ClosedError(Exception):
    """The program has ended, or keeps its state no longer."""


def sources(count: int) -> list[int]:
    """Return for each of ``count`` nodes from which other node it takes copies. Nodes form pairs, and one
    triple if their number is odd. A node alone has itself as its source.

    Pairs are better than a ring: if two nodes are lost, they rarely are of the same pair. Nodes with
    neighbouring numbers often fail together, so those of a pair are half of all nodes apart.
    """
    half = count // 2
    found = [(node + half) % (2 * half) for node in range(2 * half)]
    if count % 2:
        # The last node joins the pair of node 0, and each of the three takes from the next.
        last = count - 1
        found.append(0)
        if half:
            found[half] = last
    return found


def without_second_copy(copies: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks whose copy is equal to that of no rank of another node.

    Args:
        copies: for each rank, what identifies the content of its copy.
        nodes: first rank and number of ranks of each node.
    """
    holders: dict[tuple[int, ...], set[int]] = {}
    for node, (first, count) in enumerate(nodes):
        for rank in range(first, first + count):
            holders.setdefault(tuple(copies[rank]), set()).add(node)
    return [rank for rank, copy in enumerate(copies) if len(holders[tuple(copy)]) == 1]


class Peers:
    """Thread that takes the copies of one rank of another node into the memory of this node's agent.

    Args:
        agreement: the agreement of the nodes on the step that is restored.
        store: the store in which they have met.
        nodes: first rank and number of ranks of each node. All have the same number.
        file: the file with this rank's own copies.
        say: writes a line to the user.

    Raises:
        OffError: the file for the copies of the other rank cannot be opened.
    """

    def __init__(
        self,
        agreement: Agreement,
        store: Store,
        nodes: Sequence[Sequence[int]],
        file: KeepFile,
        say: Callable[[str], None],
    ) -> None:
        self._agreement, plan = agreement, agreement.plan
        self._store, self._nodes, self._own, self._say = store, nodes, file, say
        self._memory: int = plan["memory"]
        # A slow node must not hold up the others for long, unless the user wants it to be slow.
        self._least_rate = min(MIN_RATE, plan["bandwidth"] / 2) if plan["bandwidth"] else MIN_RATE
        self._rank, self._world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._local_rank = int(os.environ["LOCAL_RANK"])
        self._theirs = KeepFile(plan["partner_files"][self._local_rank])
        self._source = sources(len(nodes))[int(os.environ["GROUP_RANK"])]
        self._source_rank = nodes[self._source][0] + self._local_rank
        self.generations = Generations(plan["step"])
        self._secured: int | None = plan["step"]
        self._failed_in_all = self._failures = 0
        """Failed transfers of all ranks until the generation before, and of this rank in a row."""
        self._longest_delay = _LONGEST_DELAY * max(1, self._world / 500)
        self._notice = 2 * self._longest_delay
        self._schedule: Schedule | None = None
        self._closed, self._has_ended = threading.Event(), threading.Event()

    def begin(self, schedule: Schedule) -> None:
        """Start the thread at the end of the first step. ``schedule`` knows the steps of this process."""
        self._schedule, self._agreement.is_restored = schedule, True
        with without_signals():
            threading.Thread(target=self._run, args=(schedule,), name="elasticrs-peers", daemon=True).start()

    def close(self) -> None:
        """End the thread. Wait for it, but only for a short time."""
        self._closed.set()
        self.generations.close()
        if self._schedule is not None:
            self._has_ended.wait(_END_LIMIT)

    def _run(self, schedule: Schedule) -> None:
        number = 0
        try:
            while True:
                self._share(number, self.generations.wait(), schedule)
                if self._rank == 0:
                    self._store.set("next", [number + 1, [schedule.upcoming(self._notice), self._secured]])
                number += 1
                announced, secured = self._await("next", number)
                if secured is not None:
                    self._own.words[Head.SECURED] = secured + 1
                if announced is None:
                    return
                self.generations.announce(announced, secured)
        except _ClosedError:
            return
        # Whatever went wrong, for example in the store, must not end the training.
        except Exception as error:
            # If the store is lost with its node, this process is about to be stopped.
            if not self._closed.wait(_QUIET):
                self._say(f"no more periodic copies are made, here and on the partner node: {error!r}")
        finally:
            self._has_ended.set()

    def _share(self, number: int, step: int | None, schedule: Schedule) -> None:
        """Share a generation with the other nodes. ``step`` is that of this rank's copy, if it has one."""
        if self._closed.is_set():
            raise _ClosedError
        self._store.set(f"copied/{self._rank}", self._copy_of(step))
        self._store.add("copied", 1)
        if self._rank == 0:
            self._await_count("copied", self._world * (number + 1))
            self._store.set("send", [number, self._compared()])
        is_whole, senders, schedule.are_all_equal = self._await("send", number)
        if step is not None and self._source_rank in senders:
            self._take(step)
        self._store.add("taken", 1)
        if self._rank == 0:
            if not is_whole and number:
                self._notice = min(_LONGEST_NOTICE, 2 * self._notice)  # A rank has learned of it too late.
            self._await_count("taken", self._world * (number + 1))
            before, self._failed_in_all = self._failed_in_all, self._store.add("failed", 0)
            if is_whole and before == self._failed_in_all:
                self._secured = step

    def _compared(self) -> tuple[bool, list[int], bool]:
        """Return whether all ranks have a copy of the same step, whose copies must be sent to another node,
        and whether all copies are equal.
        """
        copies = self._store.get_all([f"copied/{rank}" for rank in range(self._world)])
        if None in copies or len({copy[0] for copy in copies}) > 1:
            return False, [], False
        senders = without_second_copy(copies, self._nodes)
        return True, senders, not senders and len(set(map(tuple, copies))) == 1

    def _copy_of(self, step: int | None) -> list[int] | None:
        """Return step, checksum and layout of this rank's own copy of a step; ``None`` without one."""
        for slot in self._own.slots:
            if step is not None and slot.complete_step == step and slot.words is not None:
                return [step, slot.words[Slot.DIGEST], slot.words[Slot.LAYOUT]]
        return None

    def _take(self, step: int) -> None:
        """Take the other rank's copy of a step. Tell the user if that fails."""
        if self._failures == _MOST_FAILURES or self._theirs_of(step):
            return
        try:
            self._download(step)
            self._failures = 0
        except (OSError, OffError) as error:
            # At the end of the training, the other rank may just have ended a little earlier.
            if self._closed.wait(_END_LIMIT):
                raise _ClosedError from error
            # If the copy is too large, so will be the next one.
            self._failures = _MOST_FAILURES if isinstance(error, OffError) else self._failures + 1
            follows = "its state is not kept here any more, so a loss of that node loses it"
            if self._failures < _MOST_FAILURES:
                self._store.add("failed", 1)
                follows = "the copy before is kept here, and the next one is tried"
            self._say(
                f"rank {self._source_rank}'s copy of step {step} cannot be downloaded from its node"
                f" {self._source}: {error}; {follows}"
            )

    def _theirs_of(self, step: int | None) -> list[int]:
        """Return the slots that have the other rank's copy of a step."""
        expected = SlotState.COMPLETE, step, self._source_rank, self._world
        words = (Slot.STATE, Slot.STEP, Slot.RANK, Slot.WORLD)
        heads = ((number, slot.words) for number, slot in enumerate(self._theirs.slots))
        return [
            number
            for number, head in heads
            if head is not None and tuple(head[word] for word in words) == expected
        ]

    def _download(self, step: int) -> None:
        offer = offer_of(self._store.get(f"offer/{self._source}/{self._local_rank}"))
        room = self._memory - layout.SLOTS * max(slot.capacity for slot in self._own.slots)
        kept = self._theirs_of(self.generations.secured)
        number = take_paced(offer, step, self._theirs, room // layout.SLOTS, kept, self._least_rate)
        slot = self._theirs.slots[number]
        if number not in self._theirs_of(step) or not is_intact(slot):
            slot.drop()
            raise ConnectionError("its checksum is wrong")

    def _await(self, key: str, number: int) -> Any:
        """Return the value of a key for a generation, as soon as rank 0 has set it."""
        for _ in self._looks():
            if self._store.has(key) and (found := self._store.get(key))[0] == number:
                return found[1]
        raise AssertionError

    def _await_count(self, key: str, count: int) -> None:
        for _ in self._looks():
            if self._store.add(key, 0) >= count:
                return

    def _looks(self) -> Iterator[None]:
        """Yield each time when the store is to be looked at again."""
        delay = _FIRST_DELAY
        while True:
            yield
            if self._closed.wait(delay):
                raise _ClosedError
            delay = min(self._longest_delay, delay * 1.5)
