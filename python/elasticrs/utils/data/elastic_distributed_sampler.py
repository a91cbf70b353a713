"""A sampler that begins in the middle of an epoch, where an interrupted one ended. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.distributed import DistributedSampler

if TYPE_CHECKING:
    from torch.utils.data import Dataset

__all__ = ["ElasticDistributedSampler"]


class ElasticDistributedSampler(DistributedSampler[Any]):
    """Each rank's share of the items from ``start_index`` on, in an order that only the epoch decides.

    Args:
        dataset: of a size that does not change.
        num_replicas: how many ranks; of the process group when ``None``.
        rank: of the caller; of the process group when ``None``.
        start_index: of the first item.

    Raises:
        TypeError: a dataset without a size.
        ValueError: ``start_index`` is beyond its end.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        start_index: int = 0,
    ) -> None:
        super().__init__(dataset=dataset, num_replicas=num_replicas, rank=rank)
        if not isinstance(dataset, Sized):
            raise TypeError("Dataset must be an instance of collections.abc.Sized")
        self._size = len(dataset)
        if start_index >= self._size:
            raise ValueError(f"Start index {start_index} should be less than dataset size {self._size}")
        self.start_index = start_index
        self.num_samples = math.ceil((self._size - start_index) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator()
        generator.manual_seed(self.epoch)
        left = torch.randperm(self._size - self.start_index, generator=generator)
        indices: list[int] = left.add(self.start_index).tolist()
        # Every rank gets as many; torch does not repeat often enough when there are fewer items than ranks.
        while len(indices) < self.total_size:
            indices += indices[: self.total_size - len(indices)]
        return iter(indices[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
