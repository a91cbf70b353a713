"""Metrics API under torchelastic's module name, identical to :mod:`elasticrs.metrics`."""

from __future__ import annotations

from elasticrs.metrics import api, initialize_metrics
from elasticrs.metrics.api import *  # noqa: F403

__all__ = ["initialize_metrics"]
__all__ += api.__all__
