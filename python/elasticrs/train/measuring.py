"""Measure the training loop, and publish metrics in the group ``torchelastic``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from elasticrs.metrics import api as metrics

if TYPE_CHECKING:
    from elasticrs.train.coordinator import Coordinator

GROUP = "torchelastic"

_METHODS = (
    *("rendezvous_barrier", "init_process_group", "barrier", "exchange", "should_save_checkpoint"),
    *("should_rendezvous", "should_stop_training", "announce_end", "signal_training_done"),
    *("monitor_progress", "report_progress", "on_error"),
)
"""Names of the coordinator methods whose calls are measured."""


class Times:
    """Measures the durations of one iteration of the outer training loop."""

    def __init__(self) -> None:
        self._outer = time.perf_counter()
        self.inner: float | None = None

    def put(self, name: str, began: float) -> None:
        """Publish the duration of an activity that has just finished. ``began`` is its start time."""
        metrics.put_metric(f"{name}.duration.ms", int((time.perf_counter() - began) * 1000), GROUP)

    def end_turn(self) -> None:
        """Publish the duration of the whole iteration, and that of the inner loop over steps if it has
        started.
        """
        if self.inner is not None:
            self.put("inner_train_loop", self.inner)
        self.put("outer_train_loop", self._outer)


class Measured:
    """Wraps a coordinator and measures the duration of its methods."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        for name in _METHODS:
            setattr(self, name, metrics.prof(getattr(coordinator, name), group=GROUP))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)
