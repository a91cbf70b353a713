"""Metrics API with the same names as in torch: :func:`put_metric`, :func:`prof`, handlers and groups.

>>> from elasticrs import metrics
>>> metrics.configure(metrics.ConsoleMetricHandler(), group="mine")
>>> metrics.put_metric("batches", 3, "mine")  # doctest: +SKIP

As in torch, the module ``elasticrs.metrics.static_init`` is imported if it exists. It may define its own
:func:`initialize_metrics`. The agent's own metrics are described in ``docs/metrics.md``.
"""

from __future__ import annotations

from elasticrs.metrics import api
from elasticrs.metrics.api import *  # noqa: F403

__all__ = ["initialize_metrics"]
__all__ += api.__all__


def initialize_metrics(cfg: api.MetricsConfig | None = None) -> None:
    """Do nothing. As in torch, the launcher calls this hook before the agent runs, and users may override it.

    Args:
        cfg: the launcher's ``metrics_cfg``.
    """


try:
    from elasticrs.metrics.static_init import *  # type: ignore[import-not-found] # noqa: F403
except ModuleNotFoundError as error:
    if error.name != "elasticrs.metrics.static_init":
        raise
