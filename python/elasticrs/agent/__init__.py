"""The agent of one node. The classes that users subclass are in :mod:`elasticrs.agent.server`."""

from elasticrs import lazy


def __getattr__(name: str) -> object:
    return lazy(__name__, name, {}, ("server",))
