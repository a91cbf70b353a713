"""Iterators and samplers for train steps. ``Shares`` loses no samples when workers join or leave."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from elasticrs import lazy
from elasticrs.utils.data import CyclingIterator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.utils.data import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler", "Shares"]


def __getattr__(name: str) -> object:
    # Import lazily, because the sampler's module imports torch.
    return lazy(__name__, name, {"elasticrs.utils.data": ("ElasticDistributedSampler",)})


class Shares(Iterator[list[int]]):
    """Iterator over the sample indices that one worker reads in each step of an epoch.

    Each step takes the next ``batch_size`` samples for each worker, in an order that depends only on epoch
    and seed. The last step divides the remaining samples, so a worker may get none. The position in the
    epoch does not depend on the world size. Keep the position in the training state, and advance it with
    :meth:`after`. A ``DataLoader`` accepts this object as its ``batch_sampler``. Its ``collate_fn`` has to
    accept an empty list.

    Args:
        size: number of samples in the dataset.
        batch_size: number of samples that each worker reads in a step.
        world_size: number of workers.
        rank: rank of this worker.
        start: number of samples of this epoch that all workers together have already used.
        epoch: number of the epoch.
        shuffle: false to keep the order of the dataset.
        seed: seed for the order.

    Raises:
        ValueError: an argument is out of range.
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
        """Return the position after a step that begins at ``place``. Positions count all workers' samples."""
        return min(place + self._per_step, len(self._order))

    def __len__(self) -> int:
        """Return the number of remaining steps."""
        return math.ceil((len(self._order) - self._position) / self._per_step)
