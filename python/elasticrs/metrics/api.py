"""Torch's metrics: named numbers in groups, and a handler for each group.

Beside its handler, every number goes to a sink of the process when there is one: the registry behind
``/metrics`` of a health check server.
"""

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
    """One value of a metric.

    Attributes:
        timestamp: seconds since 1970.
        group_name: its group.
        name: its name in the group.
        value: the number.
    """

    timestamp: float
    group_name: str
    name: str
    value: float


class MetricsConfig:
    """Settings for :func:`elasticrs.metrics.initialize_metrics`.

    Args:
        params: by name.
    """

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
        """Print it as torch does: ``[time][group]: name=value``."""
        timestamp, group, name, value = metric_data
        print(f"[{timestamp}][{group}]: {name}={value}")


class NullMetricHandler(MetricHandler):
    """Drops all values."""

    def emit(self, metric_data: MetricData) -> None:
        """Drop the value."""


class MetricStream:
    """A group and its handler.

    Args:
        group_name: the group.
        handler: for its numbers.
    """

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: float) -> None:
        """Add one value.

        Args:
            metric_name: its name in the group.
            metric_value: the number.
        """
        for sink in _sinks:
            sink(self.group_name, metric_name, float(metric_value))
        self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))


_metrics_map: dict[str, MetricHandler] = {}
_default_metrics_handler: MetricHandler = NullMetricHandler()
_sinks: tuple[Callable[[str, str, float], None], ...] = ()


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Set the handler of a group.

    Args:
        handler: from now on.
        group: which; ``None`` for all that have none of their own.
    """
    global _default_metrics_handler  # noqa: PLW0603 -- of the process, as in torch
    if group is None:
        _default_metrics_handler = handler
    else:
        _metrics_map[group] = handler


def add_sink(sink: Callable[[str, str, float], None]) -> None:
    """Pass group, name and value of every number of this process to one more receiver, until
    :func:`remove_sink`. Not in torch.
    """
    global _sinks  # noqa: PLW0603 -- of the process
    _sinks = (*_sinks, sink)


def remove_sink(sink: Callable[[str, str, float], None]) -> None:
    """End what :func:`add_sink` has begun; the receivers of others stay. Idempotent."""
    global _sinks  # noqa: PLW0603 -- of the process
    _sinks = tuple(each for each in _sinks if each != sink)


def has_listener(group: str) -> bool:
    """True if numbers of a group go anywhere. Not in torch."""
    return bool(_sinks) or not isinstance(
        _metrics_map.get(group, _default_metrics_handler), NullMetricHandler
    )


def getStream(group: str) -> MetricStream:  # noqa: N802 -- torch's name
    """The stream of a group, with the handler that it has now."""
    return MetricStream(group, _metrics_map.get(group, _default_metrics_handler))


def _get_metric_name(fn: Callable[..., Any]) -> str:
    qualname = fn.__qualname__
    if "." in qualname or not fn.__module__:
        return qualname
    return f"{fn.__module__.rpartition('.')[2]}.{qualname}"


def prof(fn: Callable[..., Any] | None = None, group: str = "torchelastic") -> Any:
    """Measure a function: ``NAME.success`` or ``NAME.failure`` is 1, ``NAME.duration.ms`` the time it took.

    Serves with and without arguments: ``@prof`` and ``@prof(group="mine")``. A method is named with its
    class, a function with the last part of its module.

    Args:
        fn: the function.
        group: of the numbers.
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

    return wrapper  # type: ignore[return-value]  # it has the signature of what it wraps


def profile(group: str | None = None) -> Callable[[F], F]:
    """Deprecated: use :func:`prof`.

    Args:
        group: of the numbers.
    """
    warnings.warn("Deprecated, use `@prof` instead", FutureWarning, stacklevel=2)

    def wrap(function: F) -> F:
        return _measured(function, function.__name__, group)  # type: ignore[arg-type]  # as in torch

    return wrap


def put_metric(metric_name: str, metric_value: float, metric_group: str = "torchelastic") -> None:
    """Publish a value.

    Args:
        metric_name: its name in the group.
        metric_value: the number.
        metric_group: the group.
    """
    getStream(metric_group).add_value(metric_name, metric_value)


def publish_metric(metric_group: str, metric_name: str, metric_value: float) -> None:
    """Deprecated: use :func:`put_metric`.

    Args:
        metric_group: the group.
        metric_name: its name in the group.
        metric_value: the number.
    """
    warnings.warn(
        "Deprecated, use `put_metric(metric_group)(metric_name, metric_value)` instead",
        FutureWarning,
        stacklevel=2,
    )
    put_metric(metric_name, metric_value, metric_group)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Return whole milliseconds since a moment.

    Args:
        start_time_in_seconds: since 1970.
    """
    return int((time.time() - start_time_in_seconds) * 1000)
