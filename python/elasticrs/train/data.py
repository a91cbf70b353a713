"""What a train step reads: iterators and samplers with torchelastic's names, and one that loses nothing."""

from __future__ import annotations

from elasticrs import lazy
from elasticrs.train.shares import Shares
from elasticrs.utils.data import CyclingIterator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.utils.data import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler", "Shares"]


def __getattr__(name: str) -> object:
    # Torch is imported with it.
    return lazy(__name__, name, {"elasticrs.utils.data": ("ElasticDistributedSampler",)})
