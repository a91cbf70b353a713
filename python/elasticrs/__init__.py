"""Elastic, fault-tolerant launcher and supervisor for PyTorch distributed jobs."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.launcher.api import LaunchConfig, elastic_launch, launch_agent
    from elasticrs.multiprocessing.errors import ChildFailedError, record

__version__ = "0.1.0"

__all__ = ["ChildFailedError", "LaunchConfig", "__version__", "elastic_launch", "launch_agent", "record"]


def __getattr__(name: str) -> object:
    # Neither the command line nor a worker that wants only `record` pays for the rest.
    if name in ("LaunchConfig", "elastic_launch", "launch_agent"):
        from elasticrs.launcher import api

        return getattr(api, name)
    if name in ("ChildFailedError", "record"):
        from elasticrs.multiprocessing import errors

        return getattr(errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
