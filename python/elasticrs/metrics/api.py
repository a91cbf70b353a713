"""Torch's metrics API. Each group of metrics has a handler, and sinks get the values of all groups."""

from __future__ import annotations

import functools
import time
import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    F = TypeVar("F", bound="Callable[..., Any]")

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
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]


class MetricData(NamedTuple):
    """One value of a metric. ``timestamp`` is in seconds since 1970."""

    timestamp: float
    group_name: str
    name: str
    value: float


class MetricsConfig:
    """Settings for :func:`elasticrs.metrics.initialize_metrics`, by name."""

    __slots__ = ["params"]

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = {} if params is None else params


class MetricHandler(ABC):
    """Stores or forwards metric values."""

    @abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Handle one value."""


class ConsoleMetricHandler(MetricHandler):
    """Prints a line for each value."""

    def emit(self, metric_data: MetricData) -> None:
        """Print the value in torch's format: ``[time][group]: name=value``."""
        timestamp, group, name, value = metric_data
        print(f"[{timestamp}][{group}]: {name}={value}")


class NullMetricHandler(MetricHandler):
    """Drops all values."""

    def emit(self, metric_data: MetricData) -> None: ...


class MetricStream:
    """A group of metrics and its handler."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: float) -> None:
        """Add one value of the metric."""
        for sink in _sinks:
            sink(self.group_name, metric_name, float(metric_value))
        self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))


_metrics_map: dict[str, MetricHandler] = {}
_default_metrics_handler: MetricHandler = NullMetricHandler()
_sinks: tuple[Callable[[str, str, float], None], ...] = ()


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Set the handler for the metrics of a group (``None``: all groups without a handler of their own)."""
    global _default_metrics_handler  # noqa: PLW0603 -- process-wide, as in torch
    if group is None:
        _default_metrics_handler = handler
    else:
        _metrics_map[group] = handler


def add_sink(sink: Callable[[str, str, float], None]) -> None:
    """Call ``sink`` with the group, name and value of every metric from now on. Not available in torch."""
    global _sinks  # noqa: PLW0603 -- process-wide
    _sinks = (*_sinks, sink)


def remove_sink(sink: Callable[[str, str, float], None]) -> None:
    """Remove a sink that was added with :func:`add_sink`. Idempotent."""
    global _sinks  # noqa: PLW0603 -- process-wide
    _sinks = tuple(each for each in _sinks if each != sink)


def has_listener(group: str) -> bool:
    """Return true if the group has a handler or a sink. Not available in torch."""
    return bool(_sinks) or not isinstance(
        _metrics_map.get(group, _default_metrics_handler), NullMetricHandler
    )


def getStream(group: str) -> MetricStream:  # noqa: N802 -- torch's name
    """Return the metric stream of a group, bound to the group's current handler."""
    return MetricStream(group, _metrics_map.get(group, _default_metrics_handler))


def _get_metric_name(fn: Callable[..., Any]) -> str:
    qualname = fn.__qualname__
    if "." in qualname or not fn.__module__:
        return qualname
    return f"{fn.__module__.rpartition('.')[2]}.{qualname}"


def prof(fn: Callable[..., Any] | None = None, group: str = "torchelastic") -> Any:
    """Decorate a function, so that each call records the metrics ``NAME.success`` or ``NAME.failure`` (value
    1) and ``NAME.duration.ms``.

    Can be used as ``@prof`` or ``@prof(group="mine")``. NAME is the function's name with its class, or else
    with its module.
    """

    def wrap(function: F) -> F:
        return _measured(function, _get_metric_name(function), group)

    return wrap(fn) if fn is not None else wrap


def _measured(function: F, key: str, group: str) -> F:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.time()
        try:
            result = function(*args, **kwargs)
            put_metric(f"{key}.success", 1, group)
        except Exception:
            put_metric(f"{key}.failure", 1, group)
            raise
        finally:
            put_metric(f"{key}.duration.ms", get_elapsed_time_ms(start), group)
        return result

    return wrapper  # type: ignore[return-value] # it has the signature of the wrapped function


def profile(group: str | None = None) -> Callable[[F], F]:
    """Deprecated: use :func:`prof`."""
    warnings.warn("Deprecated, use `@prof` instead", FutureWarning, stacklevel=2)

    def wrap(function: F) -> F:
        return _measured(function, function.__name__, group)  # type: ignore[arg-type]  # as in torch

    return wrap


def put_metric(metric_name: str, metric_value: float, metric_group: str = "torchelastic") -> None:
    """Publish a metric's value in a group of metrics."""
    getStream(metric_group).add_value(metric_name, metric_value)


def publish_metric(metric_group: str, metric_name: str, metric_value: float) -> None:
    """Deprecated: use :func:`put_metric`."""
    warnings.warn(
        "Deprecated, use `put_metric(metric_group)(metric_name, metric_value)` instead",
        FutureWarning,
        stacklevel=2,
    )
    put_metric(metric_name, metric_value, metric_group)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Return how many milliseconds have passed since a time, which is given in seconds since 1970."""
    return int((time.time() - start_time_in_seconds) * 1000)
