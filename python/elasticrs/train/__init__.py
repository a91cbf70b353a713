"""Run a job as a loop over train steps, in which a failure costs one step. Does not import torch."""

from __future__ import annotations

from elasticrs import __version__, lazy
from elasticrs.train.coordinator import Coordinator, NonRetryableException, RetryableException, StopException
from elasticrs.train.running import run_train, train
from elasticrs.train.state import SimpleWorkerStats, State, WorkerStats

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.train.p2p import AgentCoordinator, CoordinatorP2P, Participant, on_change

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

_HOMES = {"elasticrs.train.p2p": ("AgentCoordinator", "CoordinatorP2P", "Participant", "on_change")}
_SUBMODULES = (
    *("checkpoint", "data", "distributed", "event_logger", "events", "fault_injection", "metrics", "p2p"),
    "rendezvous",
)


def __getattr__(name: str) -> object:
    # Import lazily, because a program with its own coordinator needs no rendezvous module.
    return lazy(__name__, name, _HOMES, _SUBMODULES)
