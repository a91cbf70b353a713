"""Elastic, fault-tolerant launcher and supervisor for PyTorch distributed jobs."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.launcher.api import LaunchConfig, elastic_launch, launch_agent
    from elasticrs.multiprocessing.errors import ChildFailedError, record

__version__ = "0.1.0"

__all__ = ["ChildFailedError", "LaunchConfig", "__version__", "elastic_launch", "launch_agent", "record"]

_SUBMODULES = (
    *("agent", "control_plane", "events", "launch", "launcher", "metrics", "multiprocessing", "rendezvous"),
    *("run", "timer", "utils"),
)


def lazy_submodule(package: str, name: str, names: tuple[str, ...]) -> object:
    """The ``__getattr__`` of a package: import a submodule when its name is first used.

    Torch's packages import their modules, so that a program may write ``elastic.multiprocessing.errors``
    after an import of the package alone. Ours are imported when that is written.

    Args:
        package: its full name.
        name: what it is asked for.
        names: of its modules.

    Raises:
        AttributeError: it has none of this name.
    """
    if name not in names:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    import sys

    __import__(f"{package}.{name}")
    return sys.modules[f"{package}.{name}"]


def __getattr__(name: str) -> object:
    # Neither the command line nor a worker that wants only `record` pays for the rest.
    if name in ("LaunchConfig", "elastic_launch", "launch_agent"):
        from elasticrs.launcher import api

        return getattr(api, name)
    if name in ("ChildFailedError", "record"):
        from elasticrs.multiprocessing import errors

        return getattr(errors, name)
    return lazy_submodule(__name__, name, _SUBMODULES)
