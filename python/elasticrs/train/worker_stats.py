"""How fast a worker is."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["SimpleWorkerStats", "WorkerStats"]


class WorkerStats(ABC):
    """What a train step tells of its speed."""

    @abstractmethod
    def get_progress_rate(self) -> float | None:
        """Return a number that is larger for a faster worker, such as samples per second; ``None`` if it is
        not known.
        """


class SimpleWorkerStats(WorkerStats):
    """A rate that is known.

    Args:
        progress_rate: larger is faster.
    """

    def __init__(self, progress_rate: float | None) -> None:
        self.progress_rate = progress_rate

    def get_progress_rate(self) -> float | None:
        """Return the rate."""
        return self.progress_rate
