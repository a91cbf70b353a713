"""Sampler that can resume an interrupted epoch where it stopped. Imports torch."""

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
    """Distributes the items from ``start_index`` onwards over the ranks. The order depends only on the epoch.

    ``num_replicas`` and ``rank`` default to those of the process group. Raise ``TypeError`` if the dataset
    has no size, and ``ValueError`` if ``start_index`` is beyond its end.
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
        # Repeat items until every rank gets equally many. Unlike torch, do so even if there are fewer items
        # than ranks.
        while len(indices) < self.total_size:
            indices += indices[: self.total_size - len(indices)]
        return iter(indices[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
