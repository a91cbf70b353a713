"""Data sampler and iterator named as in torch. Only the sampler imports torch."""

from __future__ import annotations

from elasticrs import lazy
from elasticrs.utils.data.cycling_iterator import CyclingIterator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.utils.data.elastic_distributed_sampler import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]

_SAMPLER = "elastic_distributed_sampler"


def __getattr__(name: str) -> object:
    return lazy(__name__, name, {f"{__name__}.{_SAMPLER}": ("ElasticDistributedSampler",)}, (_SAMPLER,))
