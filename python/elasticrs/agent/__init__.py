"""The agent of one node: it starts and monitors the workers and decides how to react to failures.

:mod:`.state_machine` makes the decisions and :mod:`.loop` executes them. The
classes that users subclass are in :mod:`elasticrs.agent.server`.
"""

from elasticrs import lazy


def __getattr__(name: str) -> object:
    return lazy(__name__, name, {}, ("server",))
