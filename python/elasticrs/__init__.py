"""Elastic, fault-tolerant launcher and supervisor for PyTorch distributed jobs."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from elasticrs._engine.inside.boundary import checkpoint_requested
    from elasticrs.keep import Keep
    from elasticrs.launcher.api import LaunchConfig, elastic_launch, launch_agent
    from elasticrs.multiprocessing.errors import ChildFailedError, record

__version__ = "0.1.0"

__all__ = [
    "ChildFailedError",
    "Keep",
    "LaunchConfig",
    "__version__",
    "checkpoint_requested",
    "elastic_launch",
    "launch_agent",
    "record",
]

_HOMES = {
    "elasticrs._engine.inside.boundary": ("checkpoint_requested",),
    "elasticrs.keep": ("Keep",),
    "elasticrs.launcher.api": ("LaunchConfig", "elastic_launch", "launch_agent"),
    "elasticrs.multiprocessing.errors": ("ChildFailedError", "record"),
}
_SUBMODULES = (
    *(
        "agent",
        "control_plane",
        "events",
        "keep",
        "launch",
        "launcher",
        "metrics",
        "multiprocessing",
        "rendezvous",
    ),
    *("run", "timer", "utils"),
)


def lazy(
    module: str, name: str, homes: Mapping[str, tuple[str, ...]], submodules: tuple[str, ...] = ()
) -> Any:
    """Import and return a package's attribute. ``homes`` maps each defining module to the names in it."""
    import sys

    home = next((home for home, names in homes.items() if name in names), None)
    if home is None and name not in submodules:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    full = home or f"{module}.{name}"
    __import__(full)
    return getattr(sys.modules[full], name) if home else sys.modules[full]


def __getattr__(name: str) -> Any:
    # Import lazily, because the command line and workers that only use `record` must start fast.
    return lazy(__name__, name, _HOMES, _SUBMODULES)
