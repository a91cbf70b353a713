"""Statistics about the speed of a worker."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["SimpleWorkerStats", "WorkerStats"]


class WorkerStats(ABC):
    """Base class for statistics returned by a train step."""

    @abstractmethod
    def get_progress_rate(self) -> float | None:
        """Return a number that is larger for faster workers, such as samples per second, or ``None``."""


class SimpleWorkerStats(WorkerStats):
    """Worker statistics that contain only a given progress rate."""

    def __init__(self, progress_rate: float | None) -> None:
        self.progress_rate = progress_rate

    def get_progress_rate(self) -> float | None:
        return self.progress_rate
