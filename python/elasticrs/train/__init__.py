"""Run a job as a loop over train steps, in which a failure costs one step. Does not import torch."""

from __future__ import annotations

from elasticrs import __version__, lazy
from elasticrs.train.coordinator import Coordinator, NonRetryableException, RetryableException, StopException
from elasticrs.train.running import run_train, train
from elasticrs.train.state import State
from elasticrs.train.worker_stats import SimpleWorkerStats, WorkerStats

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.train.agent import AgentCoordinator
    from elasticrs.train.custom_loop import Participant, on_change
    from elasticrs.train.p2p import CoordinatorP2P

__all__ = [
    "AgentCoordinator",
    "Coordinator",
    "CoordinatorP2P",
    "NonRetryableException",
    "Participant",
    "RetryableException",
    "SimpleWorkerStats",
    "State",
    "StopException",
    "WorkerStats",
    "__version__",
    "on_change",
    "run_train",
    "train",
]

_HOMES = {
    "elasticrs.train.agent": ("AgentCoordinator",),
    "elasticrs.train.custom_loop": ("Participant", "on_change"),
    "elasticrs.train.p2p": ("CoordinatorP2P",),
}
_SUBMODULES = (
    *("agent", "checkpoint", "custom_loop", "data", "distributed", "event_logger", "events"),
    *("fault_injection", "metrics", "p2p", "rendezvous"),
)


def __getattr__(name: str) -> object:
    # Import lazily, because a program with its own coordinator needs no rendezvous module.
    return lazy(__name__, name, _HOMES, _SUBMODULES)
