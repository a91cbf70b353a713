"""Metrics, with torch's names. ``docs/metrics.md`` describes the agent's own metrics.

>>> from elasticrs import metrics
>>> metrics.configure(metrics.ConsoleMetricHandler(), group="mine")
>>> metrics.put_metric("batches", 3, "mine")  # doctest: +SKIP

As in torch, a module ``elasticrs.metrics.static_init``, if it exists, may define :func:`initialize_metrics`.
"""

from __future__ import annotations

from elasticrs.metrics.api import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    MetricsConfig,
    MetricStream,
    NullMetricHandler,
    configure,
    get_elapsed_time_ms,
    getStream,
    prof,
    profile,
    publish_metric,
    put_metric,
)

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "initialize_metrics",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Do nothing. The launcher calls this hook before the agent runs, with ``LaunchConfig.metrics_cfg``."""


try:
    from elasticrs.metrics.static_init import *  # type: ignore[import-not-found] # noqa: F403
except ModuleNotFoundError as error:
    if error.name != "elasticrs.metrics.static_init":
        raise
