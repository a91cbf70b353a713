"""Iterators and samplers for train steps. ``CyclingIterator`` and ``ElasticDistributedSampler`` are named as
in torchelastic. ``Shares`` loses no samples when workers join or leave.
"""

from __future__ import annotations

from elasticrs import lazy
from elasticrs.train.shares import Shares
from elasticrs.utils.data import CyclingIterator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.utils.data import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler", "Shares"]


def __getattr__(name: str) -> object:
    # Import the sampler on first use, because its module imports torch.
    return lazy(__name__, name, {"elasticrs.utils.data": ("ElasticDistributedSampler",)})
