"""Metrics API with the same names as in torch: :func:`put_metric`, :func:`prof`, handlers and groups.

>>> from elasticrs import metrics
>>> metrics.configure(metrics.ConsoleMetricHandler(), group="mine")
>>> metrics.put_metric("batches", 3, "mine")  # doctest: +SKIP

As in torch, the module ``elasticrs.metrics.static_init`` is imported if it exists. It may define its own
:func:`initialize_metrics`. The agent's own metrics are described in ``docs/metrics.md``.
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
    """Do nothing. As in torch, the launcher calls this hook before the agent runs, and users may override it.

    Args:
        cfg: the launcher's ``metrics_cfg``.
    """


try:
    from elasticrs.metrics.static_init import *  # type: ignore[import-not-found] # noqa: F403
except ModuleNotFoundError as error:
    if error.name != "elasticrs.metrics.static_init":
        raise
