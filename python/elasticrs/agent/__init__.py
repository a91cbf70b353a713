"""The agent of one node: it starts the workers, watches them, and decides what follows.

:mod:`~elasticrs.agent.state` decides, :mod:`~elasticrs.agent.loop` carries out. The classes that users
subclass are in :mod:`elasticrs.agent.server`.
"""

from elasticrs import lazy


def __getattr__(name: str) -> object:
    return lazy(__name__, name, {}, ("server",))
