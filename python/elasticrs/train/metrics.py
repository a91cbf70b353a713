"""Metrics API under torchelastic's module name, identical to :mod:`elasticrs.metrics`."""

from elasticrs.metrics import *  # noqa: F403
from elasticrs.metrics import __all__ as __all__  # noqa: PLC0414 -- handed on
