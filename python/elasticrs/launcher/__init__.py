"""Launching jobs: :class:`LaunchConfig`, :class:`elastic_launch`, :func:`launch_agent`."""

from __future__ import annotations

from elasticrs import lazy_submodule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.launcher.api import LaunchConfig, elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

_SUBMODULES = ("api",)


def __getattr__(name: str) -> object:
    # The command line comes through this package and must not pay for dataclasses.
    if name in __all__:
        from elasticrs.launcher import api

        return getattr(api, name)
    return lazy_submodule(__name__, name, _SUBMODULES)
