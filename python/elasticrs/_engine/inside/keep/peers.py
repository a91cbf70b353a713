"""Keeps a second copy of each node's training state in the memory of another node (``--keep-peers``).

If each node has only a part of the state (sharded state), it can be restored after the loss of a node only if
another node, the *partner*, has a second copy of the lost part. All ranks make their periodic copies at the
same steps. The copies of all ranks of one step are a *generation*. The ranks agree on each generation through
the store through which their process groups connect.

- **PEERS-1** Rank 0 announces a step ahead. At its end, each rank copies its state into its own file.
- **PEERS-2** When all ranks have done so, each node downloads the copies of the ranks of one other node (its
  source), except for copies of which any other node has an equal one. A downloaded copy never replaces one of
  the newest secured generation, but an older one.
- **PEERS-3** When all nodes have done so, the generation is *secured*: it can be restored without any one of
  the nodes. Then rank 0 announces the next step. If a rank has made no copy, or a download has failed, the
  generation before remains the secured one. So at any time, the remaining ranks and the partners of lost
  nodes have all copies of one generation.
- **PEERS-4** If the download of a rank's copies fails three times in a row, or a copy is too large, the
  partner gives up, and later generations count as secured without it. Errors never fail the training.
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
"""Seconds between the first two times that a rank looks for what other ranks have written into the store."""

_LONGEST_DELAY = 0.05
"""Maximum seconds between two looks into the store with up to 500 ranks; in proportion with more ranks."""

_LONGEST_NOTICE = 5.0
"""Maximum seconds from rank 0's announcement of a copy to the step at whose end the copy is made."""

_END_LIMIT = 1.0
"""Maximum seconds for which the end of the program waits for the thread of :class:`Peers`."""

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


class Peers:
    """Thread of a worker that downloads the copies of one rank of another node (the *other rank*, which has
    the same local rank) into a file in the memory of this node's agent.

    Args:
        agreement: the agreement of the nodes on the step that is restored.
        store: the store through which the nodes have agreed.
        nodes: for each node, its first rank and its number of ranks, which is the same for all nodes.
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
        # A slow download must not delay the other nodes for long, unless --keep-bandwidth makes it slow.
        self._least_rate = min(MIN_RATE, plan["bandwidth"] / 2) if plan["bandwidth"] else MIN_RATE
        self._rank, self._world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._local_rank = int(os.environ["LOCAL_RANK"])
        self._theirs = KeepFile(plan["partner_files"][self._local_rank])
        self._source = sources(len(nodes))[int(os.environ["GROUP_RANK"])]
        self._source_rank = nodes[self._source][0] + self._local_rank
        self.generations = Generations(plan["step"])
        self._secured: int | None = plan["step"]
        self._failed_in_all = self._failures = 0
        """Numbers of failed downloads: of all ranks before this generation, and of this rank in a row."""
        self._longest_delay = _LONGEST_DELAY * max(1, self._world / 500)
        self._notice = 2 * self._longest_delay
        self._schedule: Schedule | None = None
        self._closed, self._has_ended = threading.Event(), threading.Event()

    def begin(self, schedule: Schedule) -> None:
        """Start the thread after the first training step. ``schedule`` says when to copy the state."""
        self._schedule, self._agreement.is_restored = schedule, True
        with without_signals():
            threading.Thread(target=self._run, args=(schedule,), name="elasticrs-peers", daemon=True).start()

    def close(self) -> None:
        """Tell the thread to end, and wait for its end, but at most :data:`_END_LIMIT` seconds."""
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
        # An error in this thread, for example of the store, must not end the training.
        except Exception as error:
            # The store may be lost with its node. Then the agent stops this process, and no line is needed.
            if not self._closed.wait(_QUIET):
                self._say(f"no more periodic copies are made, here and on the partner node: {error!r}")
        finally:
            self._has_ended.set()

    def _share(self, number: int, step: int | None, schedule: Schedule) -> None:
        """Complete a generation (the copies of all ranks of one step): wait until all ranks have made their
        copies, and download that of the other rank. ``step`` is the step of this rank's copy, if it has one.
        """
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
                self._notice = min(_LONGEST_NOTICE, 2 * self._notice)  # A rank learned of the step too late.
            self._await_count("taken", self._world * (number + 1))
            before, self._failed_in_all = self._failed_in_all, self._store.add("failed", 0)
            if is_whole and before == self._failed_in_all:
                self._secured = step

    def _compared(self) -> tuple[bool, list[int], bool]:
        """Compare the copies of all ranks. Return three values: whether all are of the same step, the ranks
        whose copies another node must download, and whether all copies are equal.
        """
        copies = self._store.get_all([f"copied/{rank}" for rank in range(self._world)])
        if None in copies or len({copy[0] for copy in copies}) > 1:
            return False, [], False
        senders = without_second_copy(copies, self._nodes)
        return True, senders, not senders and len(set(map(tuple, copies))) == 1

    def _copy_of(self, step: int | None) -> list[int] | None:
        """Return step, checksum and layout of this rank's copy of ``step``; ``None`` without this copy."""
        for slot in self._own.slots:
            if step is not None and slot.complete_step == step and slot.words is not None:
                return [step, slot.words[Slot.DIGEST], slot.words[Slot.LAYOUT]]
        return None

    def _take(self, step: int) -> None:
        """Download the other rank's copy of a step, if it is not here yet. Tell the user if that fails."""
        if self._failures == _MOST_FAILURES or self._theirs_of(step):
            return
        try:
            self._download(step)
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
            self._say(
                f"rank {self._source_rank}'s copy of step {step} cannot be downloaded from its node"
                f" {self._source}: {error}; {follows}"
            )

    def _theirs_of(self, step: int | None) -> list[int]:
        """Return the numbers of the slots (regions of a file) that have the other rank's copy of a step."""
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
        """Wait until rank 0 has set a key of the store for the generation ``number``. Return the value."""
        for _ in self._looks():
            if self._store.has(key) and (found := self._store.get(key))[0] == number:
                return found[1]
        raise AssertionError

    def _await_count(self, key: str, count: int) -> None:
        for _ in self._looks():
            if self._store.add(key, 0) >= count:
                return

    def _looks(self) -> Iterator[None]:
        """Yield now and after each of longer and longer pauses, so that the caller looks into the store."""
        delay = _FIRST_DELAY
        while True:
            yield
            if self._closed.wait(delay):
                raise _ClosedError
            delay = min(self._longest_delay, delay * 1.5)
