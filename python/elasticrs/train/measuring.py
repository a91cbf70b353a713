"""Metrics of the training loop, and a heartbeat after each step in which the program has sent none."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from elasticrs._engine.inside.heartbeats import Section, heartbeat_unless_given
from elasticrs.metrics import api as metrics

if TYPE_CHECKING:
    from elasticrs.train.coordinator import Coordinator

GROUP = "torchelastic"

_METHODS = (
    *("rendezvous_barrier", "init_process_group", "barrier", "exchange", "should_save_checkpoint"),
    *("should_rendezvous", "should_stop_training", "announce_end", "signal_training_done"),
    *("monitor_progress", "report_progress", "on_error"),
)


class Times:
    def __init__(self) -> None:
        self._outer = time.perf_counter()
        self.inner: float | None = None

    def put(self, name: str, began: float) -> None:
        """Publish the duration of an activity that began at ``began``."""
        metrics.put_metric(f"{name}.duration.ms", int((time.perf_counter() - began) * 1000), GROUP)

    def end_turn(self) -> None:
        if self.inner is not None:
            self.put("inner_train_loop", self.inner)
        self.put("outer_train_loop", self._outer)


class Measured:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        for name in _METHODS:
            setattr(self, name, metrics.prof(getattr(coordinator, name), group=GROUP))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)


_meeting = Section("meeting of the workers", None)
_is_meeting = False
_count = 0
_are_watched: bool | None = None


def begin_meeting() -> None:
    """Suspend the time limit for heartbeats until a step is done. A rendezvous has its own time limits."""
    global _is_meeting  # noqa: PLW0603 -- process-wide, like the heartbeats
    # Before the first heartbeat, only the time limit for the start applies.
    if _count > 0 and not _is_meeting:
        _is_meeting = True
        _meeting.__enter__()


def step_is_done() -> None:
    """Send a heartbeat, unless the program has already sent one during the step."""
    global _is_meeting, _count, _are_watched  # noqa: PLW0603 -- see above
    if _are_watched is None:
        # The parent (nursery) process may have imported this module before it forked this worker.
        _are_watched = "ELASTICRS_HEARTBEAT" in os.environ
    if not _are_watched:
        return
    if _is_meeting:
        _is_meeting = False
        _meeting.__exit__(None, None, None)
    _count = heartbeat_unless_given(_count)
