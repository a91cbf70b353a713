"""Metrics, with torch's names. ``docs/metrics.md`` describes the agent's own metrics.

>>> from elasticrs import metrics
>>> metrics.configure(metrics.ConsoleMetricHandler(), group="mine")
>>> metrics.put_metric("batches", 3, "mine")  # doctest: +SKIP

As in torch, a module ``elasticrs.metrics.static_init``, if it exists, may define :func:`initialize_metrics`.
"""

from __future__ import annotations

from elasticrs.metrics import api
from elasticrs.metrics.api import *  # noqa: F403

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.metrics.api import MetricsConfig

__all__ = ["initialize_metrics"]
__all__ += api.__all__


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Do nothing. The launcher calls this hook before the agent runs, with ``LaunchConfig.metrics_cfg``."""


try:
    from elasticrs.metrics.static_init import *  # type: ignore[import-not-found] # noqa: F403
except ModuleNotFoundError as error:
    if error.name != "elasticrs.metrics.static_init":
        raise
