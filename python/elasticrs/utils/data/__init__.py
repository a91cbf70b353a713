"""Samplers and iterators for data, with torch's names; torch is imported with the sampler only."""

from __future__ import annotations

from elasticrs import lazy_submodule
from elasticrs.utils.data.cycling_iterator import CyclingIterator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.utils.data.elastic_distributed_sampler import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]

_SUBMODULES = ("elastic_distributed_sampler",)


def __getattr__(name: str) -> object:
    if name == "ElasticDistributedSampler":
        from elasticrs.utils.data.elastic_distributed_sampler import ElasticDistributedSampler

        return ElasticDistributedSampler
    return lazy_submodule(__name__, name, _SUBMODULES)
