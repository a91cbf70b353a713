"""Launch jobs: :class:`LaunchConfig`, :class:`elastic_launch`, :func:`launch_agent`."""

from __future__ import annotations

from elasticrs import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.launcher.api import LaunchConfig, elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]


def __getattr__(name: str) -> object:
    # Import lazily, because the command line imports this package and must not load `dataclasses`.
    return lazy(__name__, name, {"elasticrs.launcher.api": tuple(__all__)}, ("api",))
