"""Each worker's share of every step, so that no sample is lost or seen twice while workers come and go."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

__all__ = ["Shares"]


class Shares(Iterator[list[int]]):
    """The indices that one worker reads in each step of an epoch.

    All workers take the same number of steps. A step takes ``batch_size`` samples for each worker from one
    order that the epoch alone decides, and the last step shares out what is left: some workers then get
    fewer, perhaps none, and take part in the step's collectives with nothing. So the place in the epoch is
    one number that is the same for all, whatever the world: keep it in the state, and let :meth:`after` move
    it on when a step is done. A ``DataLoader`` takes this object as its ``batch_sampler``, and may draw
    ahead; for a share that is empty it needs a ``collate_fn`` that takes none.

    Args:
        size: how many samples the data have.
        batch_size: how many each worker reads in a step.
        world_size: how many workers there are.
        rank: of this one.
        start: how many samples of this epoch have been taken, by all workers together.
        epoch: decides the order.
        shuffle: ``False`` for the order of the data.
        seed: decides the order too.

    Raises:
        ValueError: a number that makes no sense.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        world_size: int,
        rank: int,
        start: int = 0,
        *,
        epoch: int = 0,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: got {rank}, expected 0 to {world_size - 1}")
        if batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}, expected at least 1")
        if not 0 <= start <= size:
            raise ValueError(f"start: got {start}, expected 0 to {size}")
        self._order: range | list[int] = range(size)
        if shuffle:
            self._order = list(self._order)
            random.Random(f"{seed} {epoch}").shuffle(self._order)
        self._position = start
        self._per_step = batch_size * world_size
        self._world_size, self._rank = world_size, rank

    def __next__(self) -> list[int]:
        step = self._order[self._position : self._position + self._per_step]
        if not step:
            raise StopIteration
        self._position = self.after(self._position)
        return list(step[self._rank :: self._world_size])

    def after(self, place: int) -> int:
        """Return the place in the epoch after a step: how many samples have then been taken, by all workers
        together.

        Args:
            place: at which the step began.
        """
        return min(place + self._per_step, len(self._order))

    def __len__(self) -> int:
        """How many steps are left."""
        return math.ceil((len(self._order) - self._position) / self._per_step)
